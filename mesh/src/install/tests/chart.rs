//! The Helm chart in `manifests/chart`: generated from the manifests and the schema of the values,
//! but `templates/_helpers.tpl`.
//!
//! `UPDATE_CHART=1 cargo test -p diy-mesh --lib chart` writes the files.

use std::{fs, path::Path};

use serde_json::json;

use super::super::values::{defaults, schema};
use super::*;

const HINT: &str = "UPDATE_CHART=1 cargo test -p diy-mesh --lib chart";

#[test]
fn chart_is_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/chart");
    let mut files = vec![
        ("Chart.yaml".to_owned(), description()),
        ("values.yaml".to_owned(), values_file()),
        ("templates/mesh.yaml".to_owned(), templates()),
    ];
    for definition in definitions() {
        let name = definition["spec"]["names"]["plural"].as_str().unwrap();
        let text = generated() + &yaml::write(std::slice::from_ref(&definition));
        files.push((format!("crds/{name}.yaml"), text));
    }
    for (name, text) in files {
        let path = folder.join(&name);
        if std::env::var_os("UPDATE_CHART").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &text).unwrap();
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == text,
            "manifests/chart/{name} is not up to date: run {HINT}"
        );
    }
}

fn generated() -> String {
    format!("# Generated from manifests/ and mesh/src/install/ by `{HINT}`.\n")
}

fn description() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let chart = json!({
        "apiVersion": "v2", "name": "diy-service-mesh", "type": "application",
        "description": "A service mesh: mutual TLS, discovery, load balancing, policies, telemetry",
        "version": version, "appVersion": version, "kubeVersion": ">=1.29.0-0",
    });
    generated() + &yaml::write(&[chart])
}

/// The defaults, with the descriptions of the schema as comments.
fn values_file() -> String {
    fn section(schema: &Value, defaults: &Value, indent: &str, text: &mut String) {
        for (name, property) in schema["properties"].as_object().unwrap() {
            let default = &defaults[name];
            if default.is_null() {
                continue;
            }
            for line in property["description"].as_str().unwrap().lines() {
                *text += &format!("{indent}# {line}\n");
            }
            if default.is_object() {
                *text += &format!("{indent}{name}:\n");
                section(property, default, &format!("{indent}  "), text);
            } else {
                *text += &format!("{indent}{name}: {default}\n");
            }
        }
    }
    let mut text = generated();
    section(&schema(), &defaults(), "", &mut text);
    text
}

/// The objects, with templates at the places of values.
fn templates() -> String {
    let mut objects = manifests();
    let mut templates = Vec::new();
    for place in places(&objects) {
        let field = objects[place.object].pointer_mut(&place.pointer).unwrap();
        let marker = format!("place-{}-of-a-value", templates.len());
        templates.push((marker.clone(), template(&place, field)));
        *field = marker.into();
    }
    let document = |object: &Value| {
        let text = yaml::write(std::slice::from_ref(object));
        if object["kind"] != "Namespace" {
            return format!("---\n{text}");
        }
        let begin = "{{- if ne .Release.Namespace .Values.namespace }}";
        format!("{begin}\n---\n{text}{{{{- end }}}}\n")
    };
    let mut text: String = objects.iter().map(document).collect();
    for (marker, template) in templates {
        text = text.replacen(&marker, &template, 1);
    }
    generated() + &text
}

fn template(place: &Place, default: &Value) -> String {
    let component = place.value.strip_prefix("image.");
    match component.filter(|component| *component != "pullPolicy") {
        Some(component) => {
            let name = default.as_str().unwrap().trim_end_matches(":dev");
            format!(
                "{{{{ include \"diy-service-mesh.image\" (list . \"{component}\" \"{name}\") | toJson }}}}"
            )
        }
        // JSON, as the text of a field.
        None if place.is_text && !value_at(&defaults(), place.value).is_string() => {
            format!("{{{{ .Values.{} | toJson | toJson }}}}", place.value)
        }
        None => format!("{{{{ .Values.{} | toJson }}}}", place.value),
    }
}
