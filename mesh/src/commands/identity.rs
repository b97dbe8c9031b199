//! `mesh identity`: shows the trust roots, the issuing CA, the state of a root rotation, and the
//! certificates of the workloads. Changes nothing.

use anyhow::Result;
use clap::Args;

use crate::terminal::{self, Cell, Colors, Output, TextStyle};
use crate::{
    controller::{self, Controllers},
    identity::status::{
        Authority, CLOCK_SKEW_WARNING_MS, Mesh, Workload, describe_phase, describe_waiting,
        has_certificate, is_steady, workload_name,
    },
    time::{format_duration, format_relative, format_timestamp, now},
};

/// The arguments of `mesh identity`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  mesh identity                         the mesh of the kubeconfig's current cluster\n  \
    mesh identity --output json | jq '.workloads[] | select(.acknowledged | not)'\n  \
    mesh identity -n shop                 the workloads of one namespace\n  \
    mesh identity --account shop/viewer   the workloads of namespace shop, with the token of an account there"
)]
pub struct Arguments {
    #[command(flatten)]
    controller: controller::Arguments,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// Reads and prints the status.
pub async fn run(arguments: &Arguments) -> Result<()> {
    let controllers = Controllers::new(&arguments.controller).await?;
    let mut mesh = Mesh::merge(controllers.identity().await?);
    if let Some(namespace) = &arguments.controller.cluster.namespace {
        mesh.keep_namespace(namespace);
    }
    let output = arguments.output;
    output.print(&mesh, |colors| text(&mesh, now(), colors))
}

fn text(mesh: &Mesh, now: u64, colors: Colors) -> String {
    let label = |text: &str| (TextStyle::Bold, text.to_owned());
    let mut rows = Vec::new();
    let mut row = |name: &str, cell: Cell| rows.push(vec![label(name), cell]);
    row("trust domain", label(&mesh.trust_domain));
    if let Some(issuer) = &mesh.issuer {
        row("issuer", authority(issuer, now));
    }
    row("location", (TextStyle::Dim, mesh.place.clone()));
    for (index, root) in mesh.roots.iter().enumerate() {
        let role = match root.role.as_str() {
            "current" => String::new(),
            role => format!("{role}: "),
        };
        let (style, text) = authority(root, now);
        let name = if index == 0 { "trust roots" } else { "" };
        row(name, (style, format!("{role}{text}")));
    }
    row("rotation", rotation(mesh, now));
    for line in describe_waiting(&mesh.rotation) {
        row("", (TextStyle::Warning, line));
    }
    row("controllers", (TextStyle::Ok, mesh.replicas.join(", ")));
    for (name, problem) in &mesh.problems {
        row("", TextStyle::Error.cell(format!("{name}: {problem}")));
    }
    for (name, text) in &mesh.clocks {
        if mesh.problems.get(name) != Some(text) {
            row("", TextStyle::Warning.cell(format!("{name}: {text}")));
        }
    }
    for (name, error) in &mesh.unreachable {
        let text = format!("{name} does not respond: {error}");
        row("", (TextStyle::Error, text));
    }
    let mut text = colors.table(&rows);
    text.push('\n');
    if mesh.workloads.is_empty() {
        text += &match mesh.namespace.as_str() {
            "" => "no workloads are connected\n".to_owned(),
            namespace => format!("no workloads of namespace {namespace} are connected\n"),
        };
        return text;
    }
    let headings = [
        "POD",
        "IDENTITY",
        "CERTIFICATE",
        "EXPIRES",
        "ROOTS",
        "CLOCK",
    ];
    let mut rows = vec![terminal::headings(headings)];
    let workloads = mesh.workloads.iter();
    rows.extend(workloads.map(|workload| cells(workload, mesh, now)));
    text + &colors.table(&rows)
}

/// Describes a CA. The style depends on its remaining lifetime.
fn authority(authority: &Authority, now: u64) -> Cell {
    let fingerprint: String = authority.fingerprint.chars().take(16).collect();
    let expires = format_relative(authority.not_after, now);
    let origin = if authority.own {
        "made by the mesh"
    } else {
        "provided by an operator"
    };
    let text = format!(
        "{} (sha256 {fingerprint}..., {origin}), expires {expires}, {}",
        authority.subject,
        format_timestamp(authority.not_after)
    );
    let style = style_of_lifetime(authority.issued_at, authority.not_after, now, 3);
    (style, text)
}

fn rotation(mesh: &Mesh, now: u64) -> Cell {
    let rotation = &mesh.rotation;
    let since = format_duration(now.saturating_sub(rotation.since));
    if is_steady(rotation) {
        let text = match rotation.reason.as_str() {
            "" => describe_phase(rotation).to_owned(),
            reason => format!("{}; {since} ago: {reason}", describe_phase(rotation)),
        };
        return (TextStyle::Ok, text);
    }
    let (phase, reason) = (&rotation.phase, &rotation.reason);
    let text = format!(
        "{phase} for {since} ({reason}): {}",
        describe_phase(rotation)
    );
    (TextStyle::Warning, text)
}

/// `Error` for an expired certificate, `Warning` if less than one `part`th of its lifetime remains.
fn style_of_lifetime(issued_at: u64, not_after: u64, now: u64, part: u64) -> TextStyle {
    let remaining = not_after.saturating_sub(now);
    match () {
        () if remaining == 0 => TextStyle::Error,
        () if remaining < not_after.saturating_sub(issued_at) / part => TextStyle::Warning,
        () => TextStyle::Ok,
    }
}

fn cells(workload: &Workload, mesh: &Mesh, now: u64) -> Vec<Cell> {
    let mut cells = vec![
        (TextStyle::Ok, workload_name(workload)),
        (TextStyle::Dim, workload.identity.clone()),
    ];
    if !has_certificate(workload) {
        cells.push((TextStyle::Error, "pending".into()));
        return cells;
    }
    let (issued_at, not_after) = (
        workload.certificate_issued_at,
        workload.certificate_not_after,
    );
    let issuer = mesh.issuer.as_ref();
    let (style, previous) = match issuer.map(|issuer| &issuer.id) {
        Some(id) if *id != workload.certificate_issuer => (TextStyle::Warning, ", previous CA"),
        _ => (TextStyle::Ok, ""),
    };
    let age = format_duration(now.saturating_sub(issued_at));
    cells.push((style, format!("{age} old{previous}")));
    // Proxies renew their certificates at 80% of the lifetime.
    let style = style_of_lifetime(issued_at, not_after, now, 10);
    cells.push((style, format_relative(not_after, now)));
    cells.push(if workload.acknowledged {
        (TextStyle::Ok, "current".into())
    } else {
        (TextStyle::Warning, "outdated".into())
    });
    let skew = workload.clock_skew_ms;
    let style = if skew.abs() < CLOCK_SKEW_WARNING_MS {
        TextStyle::Ok
    } else {
        TextStyle::Error
    };
    let duration = format_duration(skew.unsigned_abs() / 1_000);
    cells.push(match skew {
        -999..1_000 => (style, "synchronized".into()),
        1_000.. => (style, format!("{duration} ahead")),
        _ => (style, format!("{duration} behind")),
    });
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh() -> Mesh {
        let root = Authority {
            role: "current".into(),
            subject: "CN=mesh".into(),
            fingerprint: "0123456789abcdef01".into(),
            id: "aa".into(),
            own: true,
            not_after: 86_400 * 100,
            ..Authority::default()
        };
        let workload = Workload {
            namespace: "shop".into(),
            pod: "till-1".into(),
            identity: "spiffe://cluster.local/ns/shop/sa/till".into(),
            acknowledged: true,
            certificate_not_before: 1_000,
            certificate_issued_at: 1_300,
            certificate_not_after: 87_400,
            certificate_issuer: "aa".into(),
            clock_skew_ms: 200,
            ..Workload::default()
        };
        let waiting = Workload {
            pod: "new".into(),
            certificate_not_after: 0,
            ..workload.clone()
        };
        Mesh {
            trust_domain: "cluster.local".into(),
            place: "Secret a/b".into(),
            rotation: crate::identity::status::Rotation {
                phase: "steady".into(),
                since: 40,
                reason: "generated by the controller".into(),
                ..Default::default()
            },
            issuer: Some(root.clone()),
            roots: vec![root],
            replicas: vec!["controller-1".into()],
            workloads: vec![workload, waiting],
            ..Mesh::default()
        }
    }

    #[test]
    fn prints_the_status() {
        let page = text(&mesh(), 4_600, Colors::DISABLED);
        let expected = "\
trust domain  cluster.local
issuer        CN=mesh (sha256 0123456789abcdef..., made by the mesh), expires in 99 d 22 h, 1970-04-11T00:00:00Z
location      Secret a/b
trust roots   CN=mesh (sha256 0123456789abcdef..., made by the mesh), expires in 99 d 22 h, 1970-04-11T00:00:00Z
rotation      no rotation is in progress; 1 h 16 min ago: generated by the controller
controllers   controller-1

POD          IDENTITY                                CERTIFICATE  EXPIRES  ROOTS    CLOCK
shop/till-1  spiffe://cluster.local/ns/shop/sa/till  55 min old   in 23 h  current  synchronized
shop/new     spiffe://cluster.local/ns/shop/sa/till  pending
";
        assert_eq!(page, expected);
    }

    #[test]
    fn prints_problems() {
        let mut mesh = mesh();
        mesh.rotation.phase = "announcing".into();
        mesh.rotation.waiting = vec!["shop/till-1 to trust the current roots".into()];
        mesh.unreachable
            .insert("controller-2".into(), "gone".into());
        mesh.problems
            .insert("controller-1".into(), "Secret a/b holds no CA".into());
        let clocks = "the clock of the API server is 60 min ahead".to_owned();
        mesh.clocks.insert("controller-1".into(), clocks);
        mesh.workloads[0].acknowledged = false;
        mesh.workloads[0].certificate_issuer = "bb".into();
        mesh.workloads[0].clock_skew_ms = -90_000;
        let page = text(&mesh, 4_600, Colors::DISABLED);
        for part in [
            "announcing for 1 h 16 min",
            "waiting for shop/till-1 to trust",
            "controller-2 does not respond: gone",
            "controller-1: Secret a/b holds no CA",
            "controller-1: the clock of the API server is 60 min ahead",
            "previous CA",
            "outdated",
            "1 min 30 s behind",
        ] {
            assert!(page.contains(part), "{part} is not in:\n{page}");
        }
    }
}
