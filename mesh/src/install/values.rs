//! The values of an installation: their types, and the merge of defaults, files and `--set`.
//!
//! The defaults are what stands at the places of the values in `manifests/`.

use anyhow::{Context, Error, Result, anyhow, bail};
use clap::CommandFactory;
use serde_json::{Map, Value, json};

use super::{FIELDS, SCHEMA, TEXTS, manifests, places, value_at};

/// The namespace in `manifests/`.
pub const NAMESPACE: &str = "service-mesh";

/// The values of an installation of DIY Service Mesh, as their schema describes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Values(Value);

impl Values {
    /// The defaults, changed by the YAML of files, given as pairs of name and content, then by
    /// assignments such as `controller.replicas=3`. Later ones win, and `null` removes an optional
    /// value.
    pub fn load(files: &[(String, String)], assignments: &[String]) -> Result<Self> {
        let defaults = defaults();
        let mut merged = defaults.clone();
        for (name, text) in files {
            let changes = serde_yaml_ng::from_str(text);
            let changes = changes.map_err(|error| invalid(name, format!("invalid YAML: {error}")));
            match changes? {
                changes @ Value::Object(_) => json_patch::merge(&mut merged, &changes),
                Value::Null => {}
                other => bail!(invalid(name, format!("{other} is not a map of values"))),
            }
        }
        for text in assignments {
            json_patch::merge(&mut merged, &assignment(text, &defaults)?);
        }
        check(&merged, &schema(), "")?;
        let values = Self(merged);
        values.check_with_programs()?;
        Ok(values)
    }

    /// The namespace of the mesh.
    pub fn namespace(&self) -> &str {
        self.text("namespace")
    }

    /// Changes the namespace of the mesh.
    pub fn set_namespace(&mut self, namespace: &str) {
        self.0["namespace"] = namespace.into();
    }

    fn text(&self, path: &str) -> &str {
        value_at(&self.0, path).as_str().unwrap_or_default()
    }

    /// Has the programs parse what they will get.
    fn check_with_programs(&self) -> Result<()> {
        let values = self.resolved();
        let parsed_by = |path: &str, program, variable| {
            let text = match value_at(&values, path) {
                Value::Null => return Ok(()),
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            accepts(program, variable, &text)
                .map_err(|expected| invalid(path, format!("invalid value {text:?}: {expected}")))
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
                let path = format!("{path}.{quantity}");
                parsed_by(&path, "injector", "PROXY_CPU_REQUEST")?;
            }
        }
        for (path, _, variable) in TEXTS {
            parsed_by(path, "injector", variable)?;
        }
        let [certificate, ca] =
            ["certificateLife", "caLife"].map(|life| &values["controller"][life]);
        if ca.as_u64() < certificate.as_u64() {
            let problem = format!("expected at least controller.certificateLife, {certificate}");
            bail!(invalid("controller.caLife", problem));
        }
        Ok(())
    }

    /// The values with complete references of images.
    pub fn resolved(&self) -> Value {
        let mut values = self.0.clone();
        let registry = match self.text("image.registry") {
            "" => String::new(),
            registry => format!("{registry}/"),
        };
        let tag = self.text("image.tag");
        let suffix = match self.text("redirect") {
            "iptables" => "-iptables",
            _ => "",
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

/// An error about a file, or about the value at a path.
fn invalid(place: &str, problem: impl std::fmt::Display) -> Error {
    anyhow!("{place}: {problem}; `mesh install --schema` describes the values")
}

/// The schema of the values.
pub(super) fn schema() -> Value {
    serde_json::from_str(SCHEMA).expect("a test reads the schema")
}

/// Checks the types and names of values by their schema. Programs check what they contain.
fn check(value: &Value, schema: &Value, path: &str) -> Result<()> {
    let (is_type, expected) = match (&schema["enum"], schema["type"].as_str()) {
        (Value::Array(known), _) => {
            let texts: Vec<&str> = known.iter().filter_map(Value::as_str).collect();
            (
                known.contains(value),
                format!("one of {}", texts.join(", ")),
            )
        }
        (_, Some("object")) => (value.is_object(), "a map of values".into()),
        (_, Some("boolean")) => (value.is_boolean(), "true or false".into()),
        (_, Some("integer")) => {
            let least = &schema["minimum"];
            (value.is_u64(), format!("a whole number, at least {least}"))
        }
        (_, Some(_)) => (value.is_string(), "text".into()),
        (_, None) => (value.is_string() || value.is_null(), "text or null".into()),
    };
    if !is_type {
        let problem = format!("invalid value {value}, expected {expected}");
        bail!(invalid(path, problem));
    }
    let Some(properties) = schema["properties"].as_object() else {
        return Ok(());
    };
    let at = |name: &str| format!("{path}.{name}").trim_start_matches('.').to_owned();
    for name in value.as_object().into_iter().flat_map(Map::keys) {
        if !properties.contains_key(name) {
            let known: Vec<&str> = properties.keys().map(String::as_str).collect();
            let problem = format!("unknown value, expected one of {}", known.join(", "));
            bail!(invalid(&at(name), problem));
        }
    }
    properties
        .iter()
        .try_for_each(|(name, schema)| check(&value[name], schema, &at(name)))
}

/// Whether a program accepts the value of a variable, or what it expects.
fn accepts(program: &'static str, variable: &str, text: &str) -> Result<(), String> {
    let (command, required) = match program {
        "controller" => (diy_mesh_controller::config::Config::command(), None),
        _ => (
            diy_mesh_injector::config::Flags::command(),
            Some("--pod-name=injector".to_owned()),
        ),
    };
    // The variables of this process are not the variables of the program.
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

/// The tag of the images: in a release its version, else the tag of the images of `make images`.
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
        let value = value.expect("places are from the same objects");
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
fn assignment(text: &str, defaults: &Value) -> Result<Value> {
    let (path, text) = text.split_once('=').with_context(|| {
        let place = format!("--set {text}");
        invalid(&place, "expected PATH=VALUE, such as controller.replicas=3")
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
