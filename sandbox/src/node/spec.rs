//! Conversion of a container to the process that runs it: program, arguments, environment, user,
//! capabilities and mounts. Reads the file system only to check for programs and mount points.
//! `exec` applies the result.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{
    Container, EnvVar, EnvVarSource, ObjectFieldSelector, Pod, PodSpec,
};
use kube::ResourceExt;

use crate::{
    exec::{Bind, Spec},
    manifest::normalize,
};

/// The directory of programs in images and in the sandbox's pods.
const PROGRAMS_DIRECTORY: &str = "/usr/local/bin";
/// The user of the project's images. The user of proxy-init is root.
const IMAGE_USER: u32 = 65_532;
/// The default capabilities of container runtimes.
const DEFAULT_CAPABILITIES: [&str; 14] = [
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "NET_RAW",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];

/// The properties that all containers of a pod share.
pub(super) struct PodContext<'a> {
    pub(super) pod: &'a Pod,
    /// IPv4 first.
    pub(super) ips: &'a [String],
    pub(super) node_ip: String,
    /// The directory of the programs on the host.
    pub(super) programs: &'a Path,
    /// The pod's network namespace.
    pub(super) network: PathBuf,
    /// The pod's directory: `hosts`, `resolv.conf`, `volumes/NAME`, `injector`, and
    /// `containers/NAME/{run,tmp}`.
    pub(super) directory: &'a Path,
    /// The directory for the control plane: the catalog, the namespaces, and the keys that tokens
    /// are checked with.
    pub(super) control: &'a Path,
    /// The directory that controllers share: their certificate authority.
    pub(super) authority: &'a Path,
}

impl PodContext<'_> {
    fn spec(&self) -> &PodSpec {
        self.pod
            .spec
            .as_ref()
            .expect("workloads create pods with a spec")
    }

    fn private_directory(&self, container: &Container) -> PathBuf {
        self.directory.join("containers").join(&container.name)
    }

    /// The process of a container.
    pub(super) fn process(&self, container: &Container) -> Result<Spec> {
        let program = program(container.image.as_deref().unwrap_or_default())?;
        let env = self.environment(container)?;
        let security = container.security_context.clone().unwrap_or_default();
        let shared = self.spec().security_context.clone().unwrap_or_default();
        let image_user = if program == "proxy-init" {
            0
        } else {
            IMAGE_USER
        };
        let uid = id(security.run_as_user.or(shared.run_as_user))?.unwrap_or(image_user);
        let gid = id(security.run_as_group.or(shared.run_as_group))?.unwrap_or(uid);
        ensure!(
            uid != 0
                || !security
                    .run_as_non_root
                    .or(shared.run_as_non_root)
                    .unwrap_or(false),
            "container {} has runAsNonRoot but its user is root",
            container.name
        );
        let mut groups = vec![gid];
        for group in shared
            .supplemental_groups
            .into_iter()
            .flatten()
            .chain(shared.fs_group)
        {
            groups.extend(id(Some(group))?);
        }
        Ok(Spec {
            network: self.network.clone(),
            hostname: self.pod.name_any().chars().take(63).collect(),
            binds: self.binds(container)?,
            argv: self.argv(container, program, &env)?,
            env: env.into_iter().collect(),
            directory: container
                .working_dir
                .clone()
                .unwrap_or_else(|| "/".into())
                .into(),
            uid,
            gid,
            groups,
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
            list.iter()
                .flatten()
                .map(|text| expand(text, env))
                .collect()
        };
        let mut argv = expanded(&container.command);
        let uses_entrypoint = argv.is_empty();
        if uses_entrypoint {
            let file = self.programs.join(program);
            ensure!(
                file.is_file(),
                "image {}: program {program} not found in {}: build it with `cargo build --bins`",
                container.image.as_deref().unwrap_or_default(),
                self.programs.display()
            );
            argv.push(format!("{PROGRAMS_DIRECTORY}/{program}"));
        }
        argv.extend(expanded(&container.args));
        if uses_entrypoint {
            // Without a Kubernetes API the control plane reads and writes files.
            let extra: &[&str] = match program {
                "controller" => &[
                    "--catalog=files:/run/sandbox/catalog",
                    "--authenticator=jwks:/run/sandbox/jwks.json",
                    "--ca=files:/run/authority",
                ],
                "injector" => &[
                    "--serving-certificate",
                    "ephemeral",
                    "--ca-file",
                    "/run/certificate/ca.pem",
                    "--namespaces-folder",
                    "/run/sandbox/namespaces",
                ],
                _ => &[],
            };
            argv.extend(extra.iter().map(|&argument| argument.to_owned()));
            if program == "injector" {
                argv.extend(self.injected_images());
            }
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
        ensure!(
            container.env_from.iter().flatten().next().is_none(),
            "container {}: the sandbox does not support envFrom",
            container.name
        );
        let mut env = BTreeMap::from([
            (
                "PATH".to_owned(),
                "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned(),
            ),
            ("HOSTNAME".to_owned(), self.pod.name_any()),
        ]);
        for variable in container.env.iter().flatten() {
            let value = self.variable(variable, &env).with_context(|| {
                format!("container {}, variable {}", container.name, variable.name)
            })?;
            env.insert(variable.name.clone(), value);
        }
        Ok(env)
    }

    fn variable(&self, variable: &EnvVar, env: &BTreeMap<String, String>) -> Result<String> {
        match (&variable.value, &variable.value_from) {
            (Some(value), _) => Ok(expand(value, env)),
            (None, None) => Ok(String::new()),
            (
                None,
                Some(EnvVarSource {
                    field_ref: Some(field),
                    ..
                }),
            ) => self.field(field),
            _ => bail!("unsupported variable source: the sandbox supports fieldRef"),
        }
    }

    /// A field of the pod, as defined by the downward API.
    fn field(&self, field: &ObjectFieldSelector) -> Result<String> {
        let entry =
            |map: &BTreeMap<String, String>, key: &str| map.get(key).cloned().unwrap_or_default();
        let path = field.field_path.as_str();
        if let Some((map, key)) = path
            .strip_suffix("']")
            .and_then(|path| path.split_once("['"))
        {
            return match map {
                "metadata.labels" => Ok(entry(self.pod.labels(), key)),
                "metadata.annotations" => Ok(entry(self.pod.annotations(), key)),
                _ => bail!("unsupported fieldPath {path}"),
            };
        }
        Ok(match path {
            "metadata.name" => self.pod.name_any(),
            "metadata.namespace" => self.pod.namespace().unwrap_or_default(),
            "metadata.uid" => self.pod.uid().unwrap_or_default(),
            "spec.nodeName" => self.spec().node_name.clone().unwrap_or_default(),
            "spec.serviceAccountName" => service_account(self.pod),
            "status.podIP" => self.ips.first().cloned().unwrap_or_default(),
            "status.podIPs" => self.ips.join(","),
            "status.hostIP" | "status.hostIPs" => self.node_ip.clone(),
            _ => bail!("unsupported fieldPath {path}"),
        })
    }

    fn binds(&self, container: &Container) -> Result<Vec<Bind>> {
        let private = self.private_directory(container);
        let bind = |source: PathBuf, target: PathBuf, read_only| Bind {
            source,
            target,
            read_only,
        };
        let mut binds = vec![
            bind(self.programs.to_owned(), PROGRAMS_DIRECTORY.into(), true),
            bind(self.directory.join("hosts"), "/etc/hosts".into(), true),
        ];
        if let Some(target) = self
            .mount_point(Path::new("/etc/resolv.conf"), &private)
            .filter(|target| target.exists())
        {
            binds.push(bind(self.directory.join("resolv.conf"), target, true));
        }
        for mount in container.volume_mounts.iter().flatten() {
            ensure!(
                mount.sub_path.is_none() && mount.sub_path_expr.is_none(),
                "container {}: the sandbox does not support subPath",
                container.name
            );
            let target = self.mount_point(Path::new(&mount.mount_path), &private).with_context(|| {
                format!("container {}: mountPath {} not found: it must be below /run, /var/run or /tmp, or exist on the host", container.name, mount.mount_path)
            })?;
            binds.push(bind(
                self.directory.join("volumes").join(&mount.name),
                target,
                mount.read_only.unwrap_or(false),
            ));
        }
        let written = match program(container.image.as_deref().unwrap_or_default())? {
            "controller" => Some((self.authority.to_owned(), "run/authority")),
            "injector" => Some((self.directory.join("injector"), "run/certificate")),
            _ => None,
        };
        if let Some((source, target)) = written {
            binds.push(bind(
                self.control.to_owned(),
                private.join("run/sandbox"),
                true,
            ));
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

/// The name of the pod's service account.
pub(super) fn service_account(pod: &Pod) -> String {
    let name = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.service_account_name.clone());
    name.filter(|name| !name.is_empty())
        .unwrap_or_else(|| "default".into())
}

/// The program that runs in place of an image: NAME for `diy-sm-NAME`, with any registry, tag and
/// digest.
pub(super) fn program(image: &str) -> Result<&str> {
    let name = image
        .split('@')
        .next()
        .unwrap_or_default()
        .rsplit('/')
        .next()
        .unwrap_or_default();
    let name = name.split(':').next().unwrap_or_default();
    name.strip_prefix("diy-sm-").filter(|program| !program.is_empty()).with_context(|| {
        format!(
            "image {image:?} is not supported: the sandbox runs the program NAME for images named diy-sm-NAME"
        )
    })
}

fn id(value: Option<i64>) -> Result<Option<u32>> {
    value
        .map(|value| {
            u32::try_from(value).with_context(|| format!("invalid user or group id {value}"))
        })
        .transpose()
}

fn capabilities(container: &Container) -> Vec<String> {
    let requested = container
        .security_context
        .as_ref()
        .and_then(|context| context.capabilities.clone())
        .unwrap_or_default();
    let (add, drop) = (
        requested.add.unwrap_or_default(),
        requested.drop.unwrap_or_default(),
    );
    let all = drop.iter().any(|name| name == "ALL");
    let kept = DEFAULT_CAPABILITIES
        .iter()
        .filter(|&&name| !all && !drop.iter().any(|dropped| dropped == name))
        .map(|&name| name.to_owned());
    kept.chain(add.iter().cloned()).collect()
}

/// Expands `$(NAME)` to the value of the variable. Unknown names stay unchanged, and `$$(NAME)`
/// becomes `$(NAME)`.
fn expand(text: &str, env: &BTreeMap<String, String>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        if let Some(after) = after.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some((name, after)) = after
            .strip_prefix('(')
            .and_then(|after| after.split_once(')'))
        {
            match env.get(name) {
                Some(value) => out.push_str(value),
                None => out.push_str(&format!("$({name})")),
            }
            rest = after;
        } else {
            out.push('$');
            rest = after;
        }
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
            ips: &["10.0.0.7".into(), "fd00::7".into()],
            node_ip: "10.0.0.1".into(),
            programs: Path::new("/nowhere"),
            network: "/proc/1/fd/3".into(),
            directory: Path::new("/run/mesh/pods/u"),
            control: Path::new("/run/mesh/control"),
            authority: Path::new("/run/mesh/authority"),
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
             {name: APP, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['app']\"}}}], args: ['--b=$(B)']",
        )
        .unwrap();
        let env: BTreeMap<_, _> = spec.env.into_iter().collect();
        assert_eq!(
            (env["B"].as_str(), env["IP"].as_str(), env["APP"].as_str()),
            ("1$(A)$(Z)", "10.0.0.7", "shop")
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
        let error = with("securityContext: {runAsUser: 0, runAsNonRoot: true}")
            .unwrap_err()
            .to_string();
        assert!(error.contains("runAsNonRoot"), "{error}");
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
