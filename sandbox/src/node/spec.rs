//! Conversion of a container to the process that runs it: program, arguments, environment, user,
//! capabilities and mounts. Reads the file system only to check for programs and mount points.
//! `exec` applies the result.

use std::{
    collections::BTreeMap,
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{Container, EnvVarSource, Pod, PodSpec};
use kube::ResourceExt;

use super::Paths;
use crate::{
    exec::{Bind, Spec},
    manifest::normalize,
};

/// The directory of programs in images and in the sandbox's pods.
const PROGRAMS_DIRECTORY: &str = "/usr/local/bin";
/// The user of the project's images. The user of proxy-init is root.
const IMAGE_USER: u32 = 65_532;
/// The default capabilities of container runtimes.
const DEFAULT_CAPABILITIES: &str = "AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW \
    SETFCAP SETGID SETPCAP SETUID SYS_CHROOT";

/// The properties that all containers of a pod share.
pub(super) struct PodContext<'a> {
    pub(super) pod: &'a Pod,
    pub(super) ip: Ipv4Addr,
    pub(super) paths: &'a Paths,
    /// The pod's network namespace.
    pub(super) network: PathBuf,
    /// The pod's directory: `hosts`, `resolv.conf`, `volumes/NAME`, `injector`, and
    /// `containers/NAME/{run,tmp}`.
    pub(super) directory: &'a Path,
}

impl PodContext<'_> {
    pub(super) fn spec(&self) -> &PodSpec {
        let spec = self.pod.spec.as_ref();
        spec.expect("workloads create pods with a spec")
    }

    pub(super) fn private_directory(&self, container: &Container) -> PathBuf {
        self.directory.join("containers").join(&container.name)
    }

    /// Writes the process of a container to a file for `exec`.
    pub(super) fn write_spec(&self, container: &Container) -> Result<PathBuf> {
        let file = self.private_directory(container).join("spec.json");
        fs::write(&file, serde_json::to_vec(&self.process(container)?)?)?;
        Ok(file)
    }

    /// The process of a container.
    pub(super) fn process(&self, container: &Container) -> Result<Spec> {
        let program = program(container.image.as_deref().unwrap_or_default())?;
        let env = self.environment(container)?;
        let security = container.security_context.clone().unwrap_or_default();
        let shared = self.spec().security_context.clone().unwrap_or_default();
        let image_user = match program {
            "proxy-init" => 0,
            _ => IMAGE_USER,
        };
        let id = |own: Option<i64>, shared: Option<i64>, default: u32| {
            let id = own.or(shared).map_or(Ok(default), u32::try_from);
            id.context("invalid user or group id")
        };
        let uid = id(security.run_as_user, shared.run_as_user, image_user)?;
        Ok(Spec {
            network: self.network.clone(),
            hostname: self.pod.name_any().chars().take(63).collect(),
            binds: self.binds(container, program)?,
            argv: self.argv(container, program, &env)?,
            env: env.into_iter().collect(),
            uid,
            gid: id(security.run_as_group, shared.run_as_group, uid)?,
            capabilities: capabilities(container),
            no_new_privileges: security.allow_privilege_escalation == Some(false),
        })
    }

    fn argv(
        &self,
        container: &Container,
        program: &str,
        env: &BTreeMap<String, String>,
    ) -> Result<Vec<String>> {
        let expanded = |list: &Option<Vec<String>>| -> Vec<String> {
            let texts = list.iter().flatten();
            texts.map(|text| expand(text, env)).collect()
        };
        let (command, arguments) = (expanded(&container.command), expanded(&container.args));
        if !command.is_empty() {
            return Ok([command, arguments].concat());
        }
        let directory = &self.paths.programs;
        let image = container.image.as_deref().unwrap_or_default();
        ensure!(
            directory.join(program).is_file(),
            "image {image}: program {program} not found in {}: build it with `cargo build --bins`",
            directory.display()
        );
        let entrypoint = vec![format!("{PROGRAMS_DIRECTORY}/{program}")];
        // Without a Kubernetes API the control plane reads and writes files.
        let files: &[&str] = match program {
            "controller" => &[
                "--catalog=files:/run/sandbox/catalog",
                "--authenticator=jwks:/run/sandbox/jwks.json",
                "--ca=files:/run/authority",
            ],
            "injector" => &[
                "--serving-certificate=ephemeral",
                "--ca-file=/run/certificate/ca.pem",
                "--namespaces-folder=/run/sandbox/namespaces",
            ],
            // The entry point of that image.
            "proxy-init" if image.ends_with("-iptables") => &["--iptables"],
            _ => &[],
        };
        let files = files.iter().map(|&argument| argument.to_owned()).collect();
        let mut argv = [entrypoint, arguments, files].concat();
        if program == "injector" {
            argv.extend(self.injected_images());
        }
        Ok(argv)
    }

    /// The images that the injector reads from its own pod in a cluster.
    fn injected_images(&self) -> impl Iterator<Item = String> {
        let spec = self.pod.spec.iter();
        let containers = spec.flat_map(|spec| spec.init_containers.iter().flatten());
        containers.filter_map(|container| {
            let flag = match container.name.as_str() {
                "proxy-image" => "--image-to-deploy-proxy",
                "proxy-init-image" => "--image-to-deploy-proxy-init",
                _ => return None,
            };
            Some(format!("{flag}={}", container.image.as_deref()?))
        })
    }

    fn environment(&self, container: &Container) -> Result<BTreeMap<String, String>> {
        let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let mut env = BTreeMap::from([
            ("PATH".to_owned(), path.to_owned()),
            ("HOSTNAME".to_owned(), self.pod.name_any()),
        ]);
        for variable in container.env.iter().flatten() {
            let value = match (&variable.value, &variable.value_from) {
                (Some(value), _) => expand(value, &env),
                (None, None) => String::new(),
                (None, Some(source)) => self.field(source).with_context(|| {
                    format!("container {}, variable {}", container.name, variable.name)
                })?,
            };
            env.insert(variable.name.clone(), value);
        }
        Ok(env)
    }

    /// A field of the pod, as defined by the downward API.
    fn field(&self, source: &EnvVarSource) -> Result<String> {
        let field = source.field_ref.as_ref();
        Ok(match field.map(|field| field.field_path.as_str()) {
            Some("metadata.name") => self.pod.name_any(),
            Some("metadata.namespace") => self.pod.namespace().unwrap_or_default(),
            Some("status.podIP") => self.ip.to_string(),
            field => bail!(
                "unsupported source {field:?}: the sandbox supports the fields metadata.name, metadata.namespace and status.podIP"
            ),
        })
    }

    fn binds(&self, container: &Container, program: &str) -> Result<Vec<Bind>> {
        let private = self.private_directory(container);
        let bind = |source: PathBuf, target: PathBuf, read_only| Bind {
            source,
            target,
            read_only,
        };
        let mut binds = vec![
            bind(self.paths.programs.clone(), PROGRAMS_DIRECTORY.into(), true),
            bind(self.directory.join("hosts"), "/etc/hosts".into(), true),
        ];
        let resolv = self.mount_point(Path::new("/etc/resolv.conf"), &private);
        if let Some(target) = resolv.filter(|target| target.exists()) {
            binds.push(bind(self.directory.join("resolv.conf"), target, true));
        }
        for mount in container.volume_mounts.iter().flatten() {
            let target = self.mount_point(Path::new(&mount.mount_path), &private).with_context(|| {
                format!("mountPath {} not found: it must be below /run, /var/run or /tmp, or exist on the host", mount.mount_path)
            })?;
            let source = self.directory.join("volumes").join(&mount.name);
            binds.push(bind(source, target, mount.read_only.unwrap_or(false)));
        }
        let written = match program {
            "controller" => Some((self.paths.authority.clone(), "run/authority")),
            "injector" => Some((self.directory.join("injector"), "run/certificate")),
            _ => None,
        };
        if let Some((source, target)) = written {
            let control = self.paths.control.clone();
            binds.push(bind(control, private.join("run/sandbox"), true));
            binds.push(bind(source, private.join(target), false));
        }
        binds.push(bind(private.join("tmp"), "/tmp".into(), false));
        binds.push(bind(private.join("run"), "/run".into(), false));
        if Path::new("/var/run").is_dir() && !Path::new("/var/run").is_symlink() {
            binds.push(bind(private.join("run"), "/var/run".into(), false));
        }
        Ok(binds)
    }

    /// The path on the node at which to mount what the container sees at `path`: in its private
    /// directories, or on an existing path of the host. Returns `None` if there is no mount point.
    pub(super) fn mount_point(&self, path: &Path, private: &Path) -> Option<PathBuf> {
        let path = match std::fs::read_link(path) {
            Ok(target) => normalize(&path.parent().unwrap_or(Path::new("/")).join(target)),
            Err(_) => normalize(path),
        };
        for (prefix, private_name) in [("/var/run", "run"), ("/run", "run"), ("/tmp", "tmp")] {
            if let Ok(rest) = path.strip_prefix(prefix) {
                return Some(private.join(private_name).join(rest));
            }
        }
        path.exists().then_some(path)
    }
}

/// The program that runs in place of an image: NAME for `diy-sm-NAME`, with any registry, tag and
/// digest.
pub(super) fn program(image: &str) -> Result<&str> {
    let name = image.rsplit('/').next().unwrap_or_default();
    let name = name.split([':', '@']).next().unwrap_or_default();
    name.strip_prefix("diy-sm-").filter(|program| !program.is_empty()).with_context(|| {
        format!(
            "image {image:?} is not supported: the sandbox runs the program NAME for images named diy-sm-NAME"
        )
    })
}

fn capabilities(container: &Container) -> Vec<String> {
    let security = container.security_context.as_ref();
    let requested = security.and_then(|security| security.capabilities.as_ref());
    let list = |list: Option<&Vec<String>>| list.cloned().unwrap_or_default();
    let add = list(requested.and_then(|requested| requested.add.as_ref()));
    let drop = list(requested.and_then(|requested| requested.drop.as_ref()));
    let is_kept = |name: &String| !drop.contains(name) && !drop.iter().any(|all| all == "ALL");
    let defaults = DEFAULT_CAPABILITIES.split_whitespace().map(str::to_owned);
    defaults.filter(is_kept).chain(add).collect()
}

/// Expands `$(NAME)` to the value of the variable. Unknown names stay unchanged, and `$$(NAME)`
/// becomes `$(NAME)`.
fn expand(text: &str, env: &BTreeMap<String, String>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        let variable = after
            .strip_prefix('(')
            .and_then(|after| after.split_once(')'));
        let variable = variable.and_then(|(name, next)| Some((env.get(name)?.as_str(), next)));
        let (value, next) = variable.unwrap_or(("$", after.strip_prefix('$').unwrap_or(after)));
        out += before;
        out += value;
        rest = next;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pod: &str) -> Result<Spec> {
        let pod: Pod = serde_yaml_ng::from_str(pod).unwrap();
        let context = PodContext {
            pod: &pod,
            ip: Ipv4Addr::new(10, 0, 0, 7),
            paths: &Paths {
                programs: "/nowhere".into(),
                control: "/run/mesh/control".into(),
                authority: "/run/mesh/authority".into(),
            },
            network: "/proc/1/fd/3".into(),
            directory: Path::new("/run/mesh/pods/u"),
        };
        context.process(&pod.spec.as_ref().unwrap().containers[0])
    }

    fn with(container: &str) -> Result<Spec> {
        process(&format!(
            "{{metadata: {{name: p-1, namespace: a, labels: {{app: shop}}}}, spec: {{containers: [{{name: c, image: 'diy-sm-x:dev', command: [x], {container}}}]}}}}"
        ))
    }

    #[test]
    fn maps_images_to_programs() {
        assert_eq!(program("diy-sm-http-server:dev").unwrap(), "http-server");
        assert_eq!(
            program("registry.example:5000/team/diy-sm-proxy@sha256:00").unwrap(),
            "proxy"
        );
        assert!(
            program("nginx:latest")
                .unwrap_err()
                .to_string()
                .contains("nginx")
        );
    }

    #[test]
    fn error_names_the_missing_program() {
        let error =
            process("{metadata: {name: p}, spec: {containers: [{name: c, image: diy-sm-proxy}]}}")
                .unwrap_err()
                .to_string();
        assert!(
            error.contains("program proxy not found in /nowhere") && error.contains("cargo build"),
            "{error}"
        );
    }

    #[test]
    fn expands_variables_and_fields() {
        let spec = with(
            "env: [{name: A, value: '1'}, {name: B, value: '$(A)$$(A)$(Z)'}, {name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}, \
             {name: OWN, valueFrom: {fieldRef: {fieldPath: metadata.name}}}], args: ['--b=$(B)']",
        )
        .unwrap();
        let env: BTreeMap<_, _> = spec.env.into_iter().collect();
        assert_eq!(
            (env["B"].as_str(), env["IP"].as_str(), env["OWN"].as_str()),
            ("1$(A)$(Z)", "10.0.0.7", "p-1")
        );
        assert_eq!(spec.argv, ["x", "--b=1$(A)$(Z)"]);
    }

    #[test]
    fn applies_the_security_context() {
        let spec =
            with("securityContext: {runAsUser: 1337, allowPrivilegeEscalation: false, capabilities: {drop: [ALL], add: [NET_ADMIN]}}")
                .unwrap();
        assert_eq!(
            (spec.uid, spec.gid, spec.no_new_privileges),
            (1337, 1337, true)
        );
        assert_eq!(spec.capabilities, ["NET_ADMIN"]);
        let spec = with("securityContext: {}").unwrap();
        assert_eq!((spec.uid, spec.capabilities.len()), (IMAGE_USER, 14));
    }

    #[test]
    fn mounts_volumes_in_private_directories_and_rejects_missing_paths() {
        let spec =
            with("volumeMounts: [{name: token, mountPath: /var/run/secrets/diy-service-mesh}, {name: scratch, mountPath: /tmp}]").unwrap();
        let target = |name: &str| {
            spec.binds
                .iter()
                .find(|bind| bind.source.ends_with(name))
                .unwrap()
                .target
                .clone()
        };
        assert_eq!(
            target("volumes/token"),
            Path::new("/run/mesh/pods/u/containers/c/run/secrets/diy-service-mesh")
        );
        assert_eq!(
            target("volumes/scratch"),
            Path::new("/run/mesh/pods/u/containers/c/tmp")
        );
        assert_eq!(spec.binds.last().unwrap().target, Path::new("/run"));
        let error = with("volumeMounts: [{name: data, mountPath: /no-such-directory}]")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("/no-such-directory") && error.contains("/tmp"),
            "{error}"
        );
    }
}
