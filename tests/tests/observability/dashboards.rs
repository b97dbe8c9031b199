//! The dashboards: rows of panels, each with a title, a unit and queries. Grafana's JSON is made of
//! them.
//!
//! `UPDATE_DASHBOARDS=1 cargo test -p diy-mesh-tests --test observability` writes the files.

mod mesh;
mod panels;
mod traffic;

use std::fs;

use diy_mesh_tests::repository::root;
use serde_json::{Value, json};

use panels::{Dashboard, Panel};

const COLUMNS: usize = 3;

/// All dashboards.
pub fn all() -> [Dashboard; 4] {
    [
        mesh::mesh(),
        traffic::workload(),
        traffic::route(),
        mesh::control_plane(),
    ]
}

/// The queries of all panels, and of all variables.
pub fn queries() -> Vec<String> {
    let mut queries = Vec::new();
    for Dashboard {
        variables, rows, ..
    } in all()
    {
        let panels = rows.into_iter().flat_map(|(_, panels)| panels);
        queries.extend(
            panels
                .flat_map(|(.., queries)| queries)
                .map(|(_, query)| query),
        );
        let values = variables.iter().map(|(_, query)| *query);
        let metrics =
            values.filter_map(|query| query.strip_prefix("label_values(")?.rsplit_once(','));
        queries.extend(metrics.map(|(metric, _)| metric.to_owned()));
    }
    queries
}

/// Grafana's JSON, one line for each panel and variable.
fn json(dashboard: &Dashboard) -> String {
    let (mut panels, mut y) = (Vec::new(), 0);
    for (title, row) in &dashboard.rows {
        panels.push(
            json!({"type": "row", "title": title, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}}),
        );
        y += 1;
        panels.extend(
            row.iter()
                .zip(0..)
                .map(|(one, column)| panel(one, column, y)),
        );
        y += 8;
    }
    let page = json!({
        "uid": format!("diy-service-mesh-{}", dashboard.name),
        "title": format!("DIY Service Mesh / {}", dashboard.title),
        "tags": ["diy-service-mesh"], "schemaVersion": 39, "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
    });
    let source = json!({"name": "datasource", "type": "datasource", "query": "prometheus"});
    let variables = dashboard.variables.iter().map(|(name, query)| {
        json!({"name": name, "type": "query", "datasource": datasource(), "query": query, "refresh": 2, "sort": 1})
    });
    let variables: Vec<Value> = [source].into_iter().chain(variables).collect();
    let lines = |values: &[Value]| {
        let lines: Vec<_> = values.iter().map(|value| format!("  {value}")).collect();
        lines.join(",\n")
    };
    let page = page.to_string();
    let page = page.strip_suffix('}').expect("it is an object");
    format!(
        "{page},\n\"templating\": {{\"list\": [\n{}\n]}},\n\"panels\": [\n{}\n]}}\n",
        lines(&variables),
        lines(&panels)
    )
}

fn panel((title, unit, queries): &Panel, column: usize, y: usize) -> Value {
    let width = 24 / COLUMNS;
    let targets = queries
        .iter()
        .zip('A'..)
        .map(|((legend, query), id)| json!({"refId": id, "expr": query, "legendFormat": legend}));
    json!({
        "type": "timeseries", "title": title, "datasource": datasource(),
        "gridPos": {"h": 8, "w": width, "x": column * width, "y": y},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets.collect::<Vec<_>>(),
    })
}

fn datasource() -> Value {
    json!({"type": "prometheus", "uid": "${datasource}"})
}

#[test]
fn dashboards_are_up_to_date() {
    for dashboard in all() {
        let path = format!("manifests/observability/dashboards/{}.json", dashboard.name);
        let expected = json(&dashboard);
        if std::env::var_os("UPDATE_DASHBOARDS").is_some() {
            fs::write(root().join(&path), &expected).unwrap();
        }
        let found = fs::read_to_string(root().join(&path)).unwrap_or_default();
        assert!(
            found == expected,
            "{path} differs: run UPDATE_DASHBOARDS=1 cargo test -p diy-mesh-tests --test observability"
        );
        let page: Value = serde_json::from_str(&found).unwrap();
        let rows = &dashboard.rows;
        let count: usize = rows.iter().map(|(_, panels)| 1 + panels.len()).sum();
        assert_eq!(page["panels"].as_array().map(Vec::len), Some(count));
        assert!(rows.iter().all(|(_, panels)| panels.len() == COLUMNS));
    }
}
