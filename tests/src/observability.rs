//! The queries of `manifests/observability`, for the tests that check and run them, and the metrics
//! that queries and documents name.

use std::collections::BTreeSet;
use std::path::Path;

use diy_mesh_sandbox::manifest::parse;
use serde_json::Value;

use crate::repository::read;

/// The objects of a file of `manifests/observability`.
pub fn objects(file: &str) -> Vec<Value> {
    let text = read(&Path::new("manifests/observability").join(file));
    parse(&text).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// The metrics of the mesh that a text names, without the ends of the samples of histograms.
pub fn metric_names(text: &str) -> BTreeSet<String> {
    let prefixes = [
        "diy_mesh_",
        "http_server_",
        "http_client_",
        "rpc_server_",
        "rpc_client_",
    ];
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let metrics = words.filter(|word| prefixes.iter().any(|prefix| word.starts_with(prefix)));
    let ends = ["_bucket", "_count", "_sum"];
    let name = |word: &str| {
        let name = ends.iter().find_map(|end| word.strip_suffix(end));
        name.unwrap_or(word).to_owned()
    };
    metrics.map(name).collect()
}

/// A query of a recipe.
pub struct Recipe {
    /// The name of the object and, if it has several metrics, the name of the metric.
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
