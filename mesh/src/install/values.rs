//! The values of an installation: their types, and the merge of defaults, files and `--set`.
//!
//! The defaults are what stands at the places of the values in `manifests/`.

use std::fmt;

use clap::CommandFactory;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{FIELDS, manifests, places, value_at};

/// The namespace in `manifests/`.
pub const NAMESPACE: &str = "service-mesh";

/// The values of an installation of DIY Service Mesh.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Values {
    /// The namespace of the mesh, which the installation creates.
    #[cfg_attr(
        test,
        schemars(regex(pattern = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"))
    )]
    pub namespace: String,
    /// The trust domain of all identities. A change needs new certificates for all workloads.
    #[cfg_attr(test, schemars(regex(pattern = "^[a-z0-9._-]{1,255}$")))]
    pub trust_domain: String,
    /// How proxy-init redirects connections. Iptables is for kernels without nf_tables: another
    /// image of proxy-init, with the suffix -iptables of its tag.
    pub redirect: Redirect,
    /// The images.
    pub image: Image,
    /// The controller.
    pub controller: Controller,
    /// The injector.
    pub injector: Injector,
    /// The defaults of the proxies in pods. Annotations of pods take precedence.
    pub proxy: Proxy,
}

/// The tables of the kernel that redirect connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Redirect {
    /// nftables.
    Nftables,
    /// iptables.
    Iptables,
}

/// The images: `REGISTRY/NAME:TAG`, or a complete reference for a component.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Image {
    /// The registry and path of all images, such as registry.example.com/mesh. Empty: none.
    #[cfg_attr(test, schemars(regex(pattern = "^([A-Za-z0-9._:/-]*[A-Za-z0-9])?$")))]
    pub registry: String,
    /// The tag of all images.
    #[cfg_attr(test, schemars(regex(pattern = "^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")))]
    pub tag: String,
    /// The pull policy of all images, in pods too.
    #[cfg_attr(test, schemars(extend("enum" = ["Always", "IfNotPresent", "Never"])))]
    pub pull_policy: String,
    /// The complete reference of the controller's image, such as one with a digest. Empty: by
    /// registry and tag.
    pub controller: String,
    /// The complete reference of the injector's image.
    pub injector: String,
    /// The complete reference of the proxy's image.
    pub proxy: String,
    /// The complete reference of proxy-init's image, whatever the value of redirect is.
    pub proxy_init: String,
}

/// The controller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Controller {
    /// The number of replicas.
    pub replicas: u32,
    /// The resources of the container.
    pub resources: Resources,
    /// The lifetime of the certificates of workloads, in seconds.
    #[cfg_attr(test, schemars(range(min = 10, max = 3153600000_u64)))]
    pub certificate_life: u64,
    /// The lifetime of a CA that the controller generates, in seconds.
    #[cfg_attr(test, schemars(range(min = 10, max = 3153600000_u64)))]
    pub ca_life: u64,
    /// The log filter.
    pub log: String,
    /// The format of the log.
    #[cfg_attr(test, schemars(extend("enum" = ["text", "json"])))]
    pub log_format: String,
}

/// The injector.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Injector {
    /// The number of replicas.
    pub replicas: u32,
    /// The resources of the container.
    pub resources: Resources,
    /// The log filter.
    pub log: String,
    /// The format of the log.
    #[cfg_attr(test, schemars(extend("enum" = ["text", "json"])))]
    pub log_format: String,
}

/// The resources of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Resources {
    /// What it requests.
    pub requests: Quantities,
    /// Its limits. A limit of CPU time delays the answers of the control plane.
    pub limits: Quantities,
}

/// Quantities of Kubernetes, such as 100m or 64Mi. Null: none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Quantities {
    /// CPU time.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(regex(pattern = "^[0-9]")))]
    pub cpu: Option<String>,
    /// Memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(regex(pattern = "^[0-9]")))]
    pub memory: Option<String>,
}

/// The defaults of the proxies in pods.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Proxy {
    /// Whether proxies report what their pods are called by.
    pub observe_edges: bool,
    /// What proxies print of requests and responses.
    #[cfg_attr(test, schemars(extend("enum" = ["full", "headers", "off"])))]
    pub dump: String,
    /// The log filter.
    pub log: String,
    /// The format of the log.
    #[cfg_attr(test, schemars(extend("enum" = ["text", "json"])))]
    pub log_format: String,
    /// The drain period after SIGTERM, from 1s to 1h.
    #[cfg_attr(test, schemars(regex(pattern = "^[0-9]+[smh]$")))]
    pub drain: String,
    /// The requested CPU time.
    #[cfg_attr(test, schemars(regex(pattern = "^[0-9]")))]
    pub cpu_request: String,
    /// The limit of CPU time, or none.
    #[cfg_attr(test, schemars(regex(pattern = "^([0-9]|none$)")))]
    pub cpu_limit: String,
    /// The requested memory.
    #[cfg_attr(test, schemars(regex(pattern = "^[0-9]")))]
    pub memory_request: String,
    /// The limit of memory, at least 32Mi, or none.
    #[cfg_attr(test, schemars(regex(pattern = "^([0-9]|none$)")))]
    pub memory_limit: String,
}

/// The values are not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {problem}; `mesh install --schema` describes the values")]
pub struct Error {
    /// The file, or the path of the value.
    place: String,
    problem: String,
}

impl Error {
    fn new(place: impl Into<String>, problem: impl fmt::Display) -> Self {
        let (place, problem) = (place.into(), problem.to_string());
        Self { place, problem }
    }
}

impl Values {
    /// The defaults, changed by the YAML of files, given as pairs of name and content, then by
    /// assignments such as `controller.replicas=3`. Later ones win, and `null` removes an optional
    /// value.
    pub fn load(files: &[(String, String)], assignments: &[String]) -> Result<Self, Error> {
        let defaults = defaults();
        let mut merged = defaults.clone();
        for (name, text) in files {
            let changes: Value = serde_yaml_ng::from_str(text)
                .map_err(|error| Error::new(name, format!("invalid YAML: {error}")))?;
            match changes {
                Value::Object(_) => json_patch::merge(&mut merged, &changes),
                Value::Null => {}
                other => return Err(Error::new(name, format!("{other} is not a map of values"))),
            }
        }
        for text in assignments {
            json_patch::merge(&mut merged, &assignment(text, &defaults)?);
        }
        let values: Self =
            serde_path_to_error::deserialize(merged).map_err(|error| {
                match &*error.path().to_string() {
                    "." => Error::new("the values", error.inner()),
                    path => Error::new(path, error.inner()),
                }
            })?;
        values.check()?;
        Ok(values)
    }

    /// Has the programs parse what they will get.
    fn check(&self) -> Result<(), Error> {
        let values = self.resolved();
        let parsed_by = |path: &str, program, variable| {
            let text = match value_at(&values, path) {
                Value::Null => return Ok(()),
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            accepts(program, variable, &text)
                .map_err(|expected| Error::new(path, format!("invalid value {text:?}: {expected}")))
        };
        for (path, program, field) in FIELDS {
            if !field.starts_with('/') {
                parsed_by(path, program, field)?;
                continue;
            }
            for quantity in [
                "requests.cpu",
                "requests.memory",
                "limits.cpu",
                "limits.memory",
            ] {
                parsed_by(
                    &format!("{path}.{quantity}"),
                    "injector",
                    "PROXY_CPU_REQUEST",
                )?;
            }
        }
        for (path, variable) in OTHER_FIELDS {
            parsed_by(path, "injector", variable)?;
        }
        if self.controller.ca_life < self.controller.certificate_life {
            let life = self.controller.certificate_life;
            let problem = format!("expected at least controller.certificateLife, {life}");
            return Err(Error::new("controller.caLife", problem));
        }
        Ok(())
    }

    /// The values with complete references of images.
    pub fn resolved(&self) -> Value {
        let mut values = json!(self);
        let Image { registry, tag, .. } = &self.image;
        let registry = match &**registry {
            "" => String::new(),
            registry => format!("{registry}/"),
        };
        let suffix = match self.redirect {
            Redirect::Nftables => "",
            Redirect::Iptables => "-iptables",
        };
        for (component, name, suffix) in [
            ("controller", "controller", ""),
            ("injector", "injector", ""),
            ("proxy", "proxy", ""),
            ("proxyInit", "proxy-init", suffix),
        ] {
            let image = &mut values["image"][component];
            if image == "" {
                *image = format!("{registry}diy-sm-{name}:{tag}{suffix}").into();
            }
        }
        values
    }
}

/// Values outside of variables of the Deployments, and which variable of the injector has their type.
const OTHER_FIELDS: [(&str, &str); 6] = [
    ("namespace", "POD_NAMESPACE"),
    ("image.pullPolicy", "IMAGE_PULL_POLICY"),
    ("image.controller", "IMAGE_TO_DEPLOY_PROXY"),
    ("image.injector", "IMAGE_TO_DEPLOY_PROXY"),
    ("image.proxy", "IMAGE_TO_DEPLOY_PROXY"),
    ("image.proxyInit", "IMAGE_TO_DEPLOY_PROXY"),
];

/// Whether a program accepts the value of a variable, or what it expects.
fn accepts(program: &'static str, variable: &str, text: &str) -> Result<(), String> {
    let (command, required) = match program {
        "controller" => (diy_mesh_controller::config::Config::command(), None),
        _ => (
            diy_mesh_injector::config::Flags::command(),
            Some("--pod-name=injector".to_owned()),
        ),
    };
    // The variables of this process are not those of the program.
    let mut flag = None;
    let command = command.mut_args(|argument| {
        if argument.get_env().is_some_and(|name| name == variable) {
            flag = argument.get_long().map(str::to_owned);
        }
        argument.env(None::<&str>)
    });
    let flag = flag.expect("the programs have the variables of the manifests");
    let value = format!("--{flag}={text}");
    let arguments = [Some(program.to_owned()), required, Some(value)];
    let parsed = command.try_get_matches_from(arguments.into_iter().flatten());
    parsed.map(drop).map_err(|error| {
        let error = error.to_string();
        let error = error.split("\n\n").next().unwrap_or_default();
        let expected = error
            .split_once(">'")
            .map_or(error, |(_, expected)| expected);
        expected.trim_start_matches(':').trim().to_owned()
    })
}

/// The tag of the images: in a release its version, else that of the images of `make images`.
const TAG: &str = match option_env!("MESH_IMAGE_TAG") {
    Some(tag) => tag,
    None => "dev",
};

/// The values at their places in the manifests.
pub(super) fn defaults() -> Value {
    let objects = manifests();
    let image = json!({"registry": "", "tag": TAG, "controller": "", "injector": "", "proxy": "",
        "proxyInit": ""});
    let mut defaults = json!({"redirect": "nftables", "image": image});
    for place in places(&objects) {
        let value = objects[place.object].pointer(&place.pointer);
        let value = value.expect("places are those of the same objects");
        // Numbers and booleans in variables.
        let parsed = value
            .as_str()
            .and_then(|text| serde_json::from_str(text).ok());
        let value: Value = parsed.unwrap_or_else(|| value.clone());
        let (section, name) = place.value.split_once('.').unwrap_or(("", place.value));
        match section {
            "image" if name != "pullPolicy" => {}
            "" => defaults[name] = value,
            _ => defaults[section][name] = value,
        }
    }
    defaults
}

/// The change of `PATH=VALUE`. Where the default is text, so is the value: `image.tag=1.0`.
fn assignment(text: &str, defaults: &Value) -> Result<Value, Error> {
    let (path, text) = text.split_once('=').ok_or_else(|| {
        Error::new(
            format!("--set {text}"),
            "expected PATH=VALUE, such as controller.replicas=3",
        )
    })?;
    let value = match value_at(defaults, path) {
        _ if text == "null" => Value::Null,
        Value::String(_) | Value::Null => text.into(),
        _ => serde_json::from_str(text).unwrap_or_else(|_| text.into()),
    };
    Ok(path.rsplit('.').fold(value, |value, name| {
        Value::Object(Map::from_iter([(name.to_owned(), value)]))
    }))
}
