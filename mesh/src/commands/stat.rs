//! `mesh stat`: rates, success, durations and mutual TLS of the requests between workloads, as their
//! proxies saw them in the last seconds. Changes nothing.

use std::collections::BTreeSet;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};

use crate::terminal::{self, Cell, Colors, Output, TextStyle, plain};
use crate::{
    sample,
    traffic::{By, Connections, Rates, Row, Sample, TcpRow},
};

/// The arguments of `mesh stat`.
#[derive(Args, Debug)]
#[command(
    after_help = "The controllers have what proxies saw in their last 10 seconds. If none responds, at most 32 \
    proxies are asked by port-forward, twice; this needs the right pods/portforward in their namespaces.\n\n\
    Examples:\n  mesh stat                          all workloads, routes and edges\n  \
    mesh stat -n shop                  those of namespace shop\n  \
    mesh stat shop/web --by edge       the edges from and to a workload or Service\n  \
    mesh stat -o json | jq '.edges[] | select(.success < 0.99)'"
)]
pub struct Arguments {
    #[command(flatten)]
    of: Selection,
    /// Only these [default: all]
    #[arg(long, value_enum)]
    by: Option<By>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// The rows to show, and the source of their data.
#[derive(Args, Clone, Debug)]
pub struct Selection {
    /// [NAMESPACE/]NAME of a workload or Service [default: all]
    name: Option<String>,
    #[command(flatten)]
    pub(super) from: sample::Arguments,
}

/// The filter of the rows.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Empty: all.
    namespace: String,
    /// The full name of a workload or Service.
    name: Option<String>,
}

impl By {
    /// The key of the rows in JSON.
    fn key(self) -> &'static str {
        ["workloads", "routes", "edges"][self as usize]
    }

    /// The headings of the names.
    pub(super) fn headings(self) -> &'static [&'static str] {
        [&["WORKLOAD"][..], &["ROUTE"], &["FROM", "TO"]][self as usize]
    }
}

impl Selection {
    /// With the full name.
    pub(super) async fn filter(&self) -> Filter {
        let Some(name) = &self.name else {
            return Filter {
                namespace: self.from.namespace().to_owned(),
                name: None,
            };
        };
        let name = self.from.full_name(name).await;
        let namespace = name.split_once('/').map_or("", |(namespace, _)| namespace);
        Filter {
            namespace: namespace.to_owned(),
            name: Some(name),
        }
    }
}

impl Filter {
    /// The namespace whose proxies are asked. Empty: all.
    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The requests to these workloads, the requests of routes by them, or the edges from and to
    /// them.
    pub(super) fn rows(&self, by: By, sample: &Sample) -> Vec<Row> {
        let Some(names) = self.names(sample) else {
            return sample.rows(by);
        };
        let mut sample = sample.clone();
        if by == By::Route {
            sample.pods.retain(|pod| names.contains(&pod.name()));
        }
        let mut rows = sample.rows(by);
        rows.retain(|row| by == By::Route || row.names.values().any(|name| names.contains(name)));
        rows
    }

    /// The opaque connections of the same.
    pub(super) fn tcp_rows(&self, by: By, sample: &Sample) -> Vec<TcpRow> {
        let mut rows = sample.tcp_rows(by);
        if let Some(names) = self.names(sample) {
            rows.retain(|row| row.names.values().any(|name| names.contains(name)));
        }
        rows
    }

    /// The workload or Service, and the workloads of the Service. `None`: all.
    fn names(&self, sample: &Sample) -> Option<BTreeSet<String>> {
        let name = self.name.as_ref()?;
        let mut names = sample.services().remove(name).unwrap_or_default();
        names.insert(name.clone());
        Some(names)
    }
}

/// Prints a sample.
pub async fn run(arguments: &Arguments) -> Result<()> {
    let of = arguments.of.filter().await;
    let mut sampler = arguments.of.from.sampler(of.namespace(), false).await?;
    let sample = sampler.sample().await?;
    let json = arguments.json(&of, &sample);
    let text = |colors| arguments.text(&of, &sample, colors);
    arguments.output.print(&json, text)
}

impl Arguments {
    fn selected(&self) -> impl Iterator<Item = By> {
        let by = self.by;
        let is_selected = move |one: &By| by.is_none_or(|by| by == *one);
        By::value_variants().iter().copied().filter(is_selected)
    }

    fn json(&self, of: &Filter, sample: &Sample) -> Value {
        let entry = |by: By| (by.key().to_owned(), json!(of.rows(by, sample)));
        let tcp = |by: By| (format!("tcp_{}", by.key()), json!(of.tcp_rows(by, sample)));
        let entries = self.selected().map(entry);
        let mut all: Map<String, Value> = entries
            .chain(self.selected().filter(|by| *by != By::Route).map(tcp))
            .collect();
        all.insert("notes".to_owned(), json!(sample.notes));
        Value::Object(all)
    }

    fn text(&self, of: &Filter, sample: &Sample, colors: Colors) -> String {
        let mut parts = Vec::new();
        for by in self.selected() {
            let rows = of.rows(by, sample);
            if !rows.is_empty() {
                parts.push(table(by, &rows, colors));
            }
        }
        for by in self.selected() {
            let rows = of.tcp_rows(by, sample);
            if !rows.is_empty() {
                parts.push(tcp_table(by, &rows, colors));
            }
        }
        if parts.is_empty() {
            parts.push(match &of.name {
                None => "no requests and no TCP connections\n".to_owned(),
                Some(name) => format!(
                    "no requests and no TCP connections from or to {}; without a name, all are shown that have some\n",
                    terminal::printable(name)
                ),
            });
        }
        let note = |note: &String| terminal::printable(note) + "\n";
        let notes: String = sample.notes.iter().map(note).collect();
        parts.extend(Some(notes).filter(|notes| !notes.is_empty()));
        parts.join("\n")
    }
}

fn table(by: By, rows: &[Row], colors: Colors) -> String {
    let headings = by.headings().iter().copied().chain(RATES);
    let headings = headings.map(|text| TextStyle::Bold.cell(text)).collect();
    let cells = rows.iter().map(|Row { names, rates }| {
        let [rps, success, rest @ ..] = texts(rates);
        let style = match rates.success {
            1.0.. => TextStyle::Ok,
            0.99.. => TextStyle::Warning,
            _ => TextStyle::Error,
        };
        let names = names.values().map(|name| TextStyle::Bold.cell(name));
        let cells: Vec<Cell> = names
            .chain([plain(rps), style.cell(success)])
            .chain(rest.map(plain))
            .collect();
        cells
    });
    colors.table(&std::iter::once(headings).chain(cells).collect::<Vec<_>>())
}

/// Opaque connections.
fn tcp_table(by: By, rows: &[TcpRow], colors: Colors) -> String {
    let headings = by.headings().iter().copied().chain(TCP);
    let headings = headings.map(|text| TextStyle::Bold.cell(text)).collect();
    let cells = rows.iter().map(|TcpRow { names, connections }| {
        let names = names.values().map(|name| TextStyle::Bold.cell(name));
        let values = tcp_texts(connections).into_iter();
        names.chain(values.map(plain)).collect::<Vec<Cell>>()
    });
    colors.table(&std::iter::once(headings).chain(cells).collect::<Vec<_>>())
}

/// The values of opaque connections, for people.
pub(super) fn tcp_texts(connections: &Connections) -> [String; 5] {
    let kilobytes = |bytes: f64| format!("{:.1}", bytes / 1e3);
    [
        connections.connections.to_string(),
        connections.open.to_string(),
        kilobytes(connections.sent_bytes_per_second),
        kilobytes(connections.received_bytes_per_second),
        percent(connections.mutual_tls),
    ]
}

/// The headings of the values of opaque connections.
pub(super) const TCP: [&str; 5] = ["TCP", "OPEN", "SENT KB/S", "RECEIVED KB/S", "MTLS"];

/// 100% means all.
fn percent(share: f64) -> String {
    format!("{:.2}%", (share * 1e4).floor() / 1e2)
}

/// The headings of the values.
pub(super) const RATES: [&str; 6] = ["RPS", "SUCCESS", "P50", "P95", "P99", "MTLS"];

/// The values, for people.
pub(super) fn texts(rates: &Rates) -> [String; 6] {
    let ms = |ms: f64| match ms {
        0.0 => "-".to_owned(),
        ms if ms < 100.0 => format!("{ms:.1} ms"),
        ms => format!("{ms:.0} ms"),
    };
    [
        format!("{:.1}", rates.requests_per_second),
        percent(rates.success),
        ms(rates.p50_ms),
        ms(rates.p95_ms),
        ms(rates.p99_ms),
        percent(rates.mutual_tls),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::parsed;
    use crate::traffic::testing::{flow, pod};

    fn sample() -> Sample {
        let mut routed = flow(false, "shop/cart", 100);
        routed.route = "shop/canary".into();
        Sample {
            pods: vec![
                pod("shop/web", vec![routed, flow(false, "pay/api", 2)]),
                pod("shop/cart", vec![flow(true, "shop/web", 100)]),
            ],
            notes: vec!["2 of 9 proxies\x1b".into()],
        }
    }

    fn arguments(line: &str) -> Arguments {
        parsed(line).expect("it is valid")
    }

    #[test]
    fn tables_have_the_rates_of_workloads_routes_and_edges() {
        let text = arguments("mesh").text(&Filter::default(), &sample(), Colors::DISABLED);
        assert_eq!(
            text,
            "WORKLOAD   RPS   SUCCESS  P50     P95     P99     MTLS\n\
             shop/cart  50.0  99.00%   0.2 ms  0.5 ms  0.5 ms  50.00%\n\
             \n\
             ROUTE        RPS   SUCCESS  P50     P95     P99     MTLS\n\
             shop/canary  50.0  99.00%   0.2 ms  0.5 ms  0.5 ms  50.00%\n\
             \n\
             FROM      TO         RPS   SUCCESS  P50     P95     P99     MTLS\n\
             shop/web  pay/api    1.0   50.00%   0.2 ms  0.5 ms  0.5 ms  50.00%\n\
             shop/web  shop/cart  50.0  99.00%   0.2 ms  0.5 ms  0.5 ms  50.00%\n\
             \n\
             2 of 9 proxies\\x1b\n"
        );
        let none = arguments("mesh").text(&Filter::default(), &Sample::default(), Colors::DISABLED);
        assert_eq!(none, "no requests and no TCP connections\n");
    }

    #[test]
    fn hostile_report_adds_no_lines_and_no_numbers_that_are_none() {
        let mut hostile = flow(true, "shop\n/a\x1b[2J\u{202e}", u64::MAX);
        (hostile.failures, hostile.durations) = (u64::MAX, vec![u64::MAX; 1000]);
        let mut pod = pod("shop/cart", vec![hostile.clone(), hostile]);
        pod.traffic.milliseconds = 0;
        let sample = Sample {
            pods: vec![pod],
            ..Sample::default()
        };
        let text = arguments("mesh").text(&Filter::default(), &sample, Colors::DISABLED);
        assert_eq!(text.lines().count(), 5, "{text}");
        let mut controls = text.chars().filter(|one| one.is_control());
        assert!(controls.all(|one| one == '\n'), "{text:?}");
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        let json = arguments("mesh").json(&Filter::default(), &sample);
        assert!(!json.to_string().contains("null"), "{json}");
    }

    #[tokio::test]
    async fn name_without_requests_is_told() {
        let of = filter("mesh shop/typo").await;
        let text = arguments("mesh").text(&of, &sample(), Colors::DISABLED);
        assert!(
            text.starts_with("no requests and no TCP connections from or to shop/typo; "),
            "{text}"
        );
        let of = filter("mesh shop/\u{1b}[2J\u{202e}").await;
        let text = arguments("mesh").text(&of, &Sample::default(), Colors::DISABLED);
        let expected = "no requests and no TCP connections from or to shop/\\x1b[2J\\u{202e}; ";
        assert!(text.starts_with(expected), "{text:?}");
    }

    async fn filter(line: &str) -> Filter {
        arguments(line).of.filter().await
    }

    #[tokio::test]
    async fn service_selects_its_workloads() {
        let mut sample = sample();
        sample.pods[1].workload = "cart-v1".into();
        sample.pods[1].services = vec!["cart".into()];
        for (name, workloads) in [("shop/cart", 1), ("shop/cart-v1", 1), ("shop/web", 0)] {
            let rows = filter(&format!("mesh {name}"))
                .await
                .rows(By::Workload, &sample);
            assert_eq!(rows.len(), workloads, "{name}");
        }
    }

    #[tokio::test]
    async fn filter_selects_rows_and_the_namespace_that_is_asked() {
        for (line, namespace, workloads, edges) in [
            ("mesh", "", 1, 2),
            ("mesh -n shop", "shop", 1, 2),
            ("mesh shop/cart", "shop", 1, 1),
            ("mesh web -n shop", "shop", 0, 2),
            ("mesh --demo web -n shop", "shop", 0, 2),
            ("mesh pay/api", "pay", 0, 1),
        ] {
            let of = filter(line).await;
            assert_eq!(of.namespace(), namespace, "{line}");
            let counts = [By::Workload, By::Edge].map(|by| of.rows(by, &sample()).len());
            assert_eq!(counts, [workloads, edges], "{line}");
        }
        let of = async |line| filter(line).await.rows(By::Route, &sample()).len();
        assert_eq!(
            (of("mesh shop/web").await, of("mesh shop/cart").await),
            (1, 0)
        );
    }

    #[tokio::test]
    async fn json_has_the_selected_rows_and_the_notes() {
        let line = "mesh shop/cart --by edge";
        let value = arguments(line).json(&filter(line).await, &sample());
        let keys: Vec<_> = value.as_object().expect("an object").keys().collect();
        assert_eq!(keys, ["edges", "notes", "tcp_edges"]);
        let edge = &value["edges"][0];
        assert_eq!(
            (&edge["from"], &edge["to"]),
            (&json!("shop/web"), &json!("shop/cart"))
        );
        assert_eq!(
            (&edge["success"], &edge["mutual_tls"]),
            (&json!(0.99), &json!(0.5))
        );
    }

    #[test]
    fn one_failure_is_never_rounded_away() {
        let rates = Rates {
            success: 0.99999,
            p99_ms: 123.4,
            ..Rates::default()
        };
        assert_eq!(
            texts(&rates),
            ["0.0", "99.99%", "-", "-", "123 ms", "0.00%"]
        );
    }
}
