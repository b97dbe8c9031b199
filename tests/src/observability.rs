//! The queries of `manifests/observability`, for the tests that check and run them.

use std::path::Path;
use std::process::Command;

use diy_mesh_sandbox::manifest::parse;
use serde_json::Value;

use crate::repository::read;

/// Whether a program is installed. In CI, it must be.
pub fn has_program(name: &str) -> bool {
    let found = Command::new(name).arg("--version").output().is_ok();
    let is_required = std::env::var_os("CI").is_some();
    assert!(found || !is_required, "{name} is missing");
    if !found {
        eprintln!("skipped: {name} is missing");
    }
    found
}

/// The objects of a file of `manifests/observability`.
pub fn objects(file: &str) -> Vec<Value> {
    let text = read(&Path::new("manifests/observability").join(file));
    parse(&text).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// A query of a recipe.
pub struct Recipe {
    /// The name of the object and, if it has several metrics, that of the metric.
    pub name: String,
    /// The query, with variables.
    query: String,
}

impl Recipe {
    /// The query with these values. Both Flagger and Argo Rollouts write `{{` before variables.
    pub fn query(&self, values: &[(&str, &str)]) -> String {
        let mut query = self.query.replace("{{ ", "{{").replace(" }}", "}}");
        for (name, value) in values {
            for name in [format!("{{{{{name}}}}}"), format!("{{{{args.{name}}}}}")] {
                query = query.replace(&name, value);
            }
        }
        assert!(!query.contains("{{"), "a variable has no value: {query}");
        query
    }
}

/// All queries for Flagger and for Argo Rollouts.
pub fn recipes() -> Vec<Recipe> {
    let objects = ["recipes/flagger.yaml", "recipes/argo-rollouts.yaml"].map(objects);
    let mut recipes = Vec::new();
    for object in objects.iter().flatten() {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let mut add = |name: String, query: &Value| {
            let query = query.as_str().unwrap_or_default().to_owned();
            recipes.push(Recipe { name, query });
        };
        match object["spec"]["metrics"].as_array() {
            None => add(name.to_owned(), &object["spec"]["query"]),
            Some(metrics) => metrics.iter().for_each(|metric| {
                let metric_name = metric["name"].as_str().unwrap_or_default();
                let query = &metric["provider"]["prometheus"]["query"];
                add(format!("{name}/{metric_name}"), query);
            }),
        }
    }
    recipes
}
