//! The tables of metrics in docs/operations.md are generated from scrapes of the components.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use clap::Parser;
use diy_mesh_controller::Controller;
use diy_mesh_model::exchange::Direction;
use diy_mesh_proxy::error::Scope;
use diy_mesh_proxy::labels::{ErrorType, Peer, TlsKind};
use diy_mesh_proxy::observe::exceptions::{Event, Kind};
use diy_mesh_proxy::observe::metrics::{Counted, Metrics, RequestLabels};
use diy_mesh_proxy::route::fault::FaultKind;
use diy_mesh_testkit::http::{get, send};
use diy_mesh_testkit::tokens::Signer;
use diy_mesh_testkit::wait::eventually;
use diy_mesh_tests::observability::metric_names;
use diy_mesh_tests::repository::{assert_none, read};

use super::documents;
use super::generated::assert_generated;

/// The table has the values of a label with at least two, and at most these.
const MAX_VALUES: usize = 8;
/// A label whose values the text above the table has.
const COMMON_LABEL: &str = "direction";

/// A metric of a page.
#[derive(Default)]
struct Metric {
    help: String,
    kind: String,
    /// The labels of its samples. `None`: there is no sample.
    labels: Option<Vec<Label>>,
}

struct Label {
    name: String,
    values: BTreeSet<String>,
}

#[test]
fn operations_has_the_metrics_of_each_component() {
    let tables = scrapes().into_iter().map(|(component, metrics)| {
        let header = "\n| metric | type | labels | description |\n|---|---|---|---|\n";
        let rows = metrics.iter().map(|(name, metric)| row(name, metric));
        let rows: String = rows.collect();
        (component.to_owned(), format!("{header}{rows}\n"))
    });
    assert_generated("docs/operations.md", "metrics", &tables.collect());
}

#[test]
fn documented_metrics_exist() {
    let scrapes = scrapes();
    let mut known: BTreeSet<String> = scrapes.values().flat_map(BTreeMap::keys).cloned().collect();
    // Filters of logs name the crates.
    known.extend(
        scrapes
            .keys()
            .map(|component| format!("diy_mesh_{component}")),
    );
    let (mut named, mut unknown) = (0, Vec::new());
    for document in documents() {
        let names = metric_names(&read(&document));
        named += names.len();
        let names = names.difference(&known);
        unknown.extend(names.map(|name| format!("{}: {name}", document.display())));
    }
    assert!(named > 100, "cannot parse the documents: {named} metrics");
    assert_none("unknown metrics", unknown);
}

fn row(name: &str, metric: &Metric) -> String {
    let Metric { help, kind, labels } = metric;
    let labels = labels.as_ref();
    let labels = labels.unwrap_or_else(|| panic!("{name} has no sample: record one in this file"));
    let labels: Vec<String> = labels.iter().map(label).collect();
    let description = help.trim_end_matches('.').replace('|', "\\|");
    let labels = labels.join(", ");
    format!("| `{name}` | {kind} | {labels} | {description} |\n").replace("|  |", "| |")
}

/// A label, with its values if they are a small set.
fn label(label: &Label) -> String {
    let Label { name, values } = label;
    let values: Vec<_> = values.iter().map(|value| format!("`{value}`")).collect();
    match values.len() {
        2..=MAX_VALUES if name != COMMON_LABEL => format!("{name} ({})", values.join(", ")),
        _ => name.clone(),
    }
}

/// The metrics of each component by their names. A label of names, such as names of policies, has
/// one value.
fn scrapes() -> BTreeMap<&'static str, BTreeMap<String, Metric>> {
    let pages = [
        ("proxy", proxy()),
        ("controller", controller()),
        (
            "injector",
            diy_mesh_injector::metrics::Metrics::default().render(),
        ),
    ];
    BTreeMap::from(pages.map(|(component, page)| (component, parse(&page))))
}

/// Parses a page in the OpenMetrics text format.
fn parse(page: &str) -> BTreeMap<String, Metric> {
    let mut metrics = BTreeMap::new();
    let (mut name, mut help) = (String::new(), "");
    for line in page.lines() {
        let mut words = line.splitn(4, ' ');
        match [(); 4].map(|()| words.next()) {
            [Some("#"), Some("HELP"), _, Some(text)] => help = text,
            [Some("#"), Some("TYPE"), Some(family), Some(kind)] => {
                let end = if kind == "counter" { "_total" } else { "" };
                name = format!("{family}{end}");
                let (help, kind) = (help.to_owned(), kind.to_owned());
                let metric = Metric {
                    help,
                    kind,
                    labels: None,
                };
                metrics.insert(name.clone(), metric);
            }
            [Some("#"), ..] => {}
            _ => add_sample(metrics.get_mut(&name).expect("a type"), line),
        }
    }
    metrics
}

/// Adds the labels of a sample to the labels of its metric.
fn add_sample(metric: &mut Metric, sample: &str) {
    let labels = metric.labels.get_or_insert_default();
    let (_, pairs) = sample.split_once('{').unwrap_or_default();
    let parts: Vec<&str> = pairs.split('"').collect();
    for pair in parts.chunks_exact(2) {
        let name = pair[0].trim_matches([',', '=']);
        let index = labels.iter().position(|known| known.name == name);
        let index = index.unwrap_or_else(|| {
            let (name, values) = (name.to_owned(), BTreeSet::new());
            labels.push(Label { name, values });
            labels.len() - 1
        });
        // A label without a value is absent.
        labels[index]
            .values
            .extend(Some(pair[1].to_owned()).filter(|value| !value.is_empty()));
    }
    labels.retain(|label| label.name != "le");
}

/// The page of a proxy to which everything happened that it counts by names.
fn proxy() -> String {
    let (metrics, now) = (Metrics::new(), Instant::now());
    for direction in [Direction::Inbound, Direction::Outbound] {
        for (grpc, tls) in [
            ("", TlsKind::None),
            ("", TlsKind::Mutual),
            ("OK", TlsKind::Server),
        ] {
            let labels = RequestLabels {
                direction,
                route: Some("HTTPRoute shop/web".into()),
                peer: Peer::new("web", "shop"),
                method: "GET",
                status: 200,
                grpc,
                error: ErrorType::None,
                tls,
            };
            metrics.request(&Counted::default(), labels, [0; 2], Duration::ZERO, now);
        }
    }
    let name: Arc<str> = "TrafficPolicy shop/web".into();
    for kind in [FaultKind::Delay, FaultKind::Abort] {
        metrics.fault(kind, &name);
    }
    for scope in [Scope::Service, Scope::Caller] {
        metrics.rate_limited(scope, &name);
    }
    let event = Event {
        kind: Kind::Requests,
        destination: "shop/web",
        endpoint: "10.0.0.1:80",
        reason: "timeout",
    };
    metrics.exceptions.record(event, 1, now);
    metrics.discovery.message_received();
    metrics.identity.issued(SystemTime::now());
    metrics.render()
}

/// The page of a controller that is ready.
#[tokio::main(flavor = "current_thread")]
async fn controller() -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    for name in ["catalog", "ca"] {
        std::fs::create_dir(path(name)).expect("a folder");
    }
    std::fs::write(path("keys"), Signer::named("a").jwks()).expect("a file");
    let config = diy_mesh_controller::Config::parse_from([
        "controller".to_owned(),
        "--listen=127.0.0.1:0".to_owned(),
        "--admin-listen=127.0.0.1:0".to_owned(),
        format!("--catalog=files:{}", path("catalog")),
        format!("--ca=files:{}", path("ca")),
        format!("--authenticator=jwks:{}", path("keys")),
    ]);
    let controller = Controller::bind(config).await.expect("a controller");
    let admin = controller.admin_address();
    let running = tokio::spawn(controller.run(std::future::pending()));
    eventually("the controller is ready", async || {
        assert!(!running.is_finished(), "the controller has ended");
        let (status, reasons) = get(admin, "/ready").await;
        (status == 200).then_some(()).ok_or(reasons)
    })
    .await;
    let accept = "Accept: application/openmetrics-text\r\n";
    let (_, _, page) = send(admin, "GET", "/metrics", accept).await;
    page
}
