//! `mesh identity`: whom the mesh trusts, who signs, how far a rotation is, and each workload's certificate. It changes nothing.

use std::{io, process::ExitCode};

use anyhow::Result;
use clap::Args;
use serde_json::json;

use super::style::{self, Output, Style, Tone};
use crate::{
    identity::{
        source::{self, Source},
        status::{Authority, Mesh, Workload, is_steady, made, meaning},
    },
    time::{from_now, now, span, stamp},
};

/// What it can be told.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  mesh identity                         the mesh of the kubeconfig's current cluster\n  \
    mesh identity --output json | jq '.workloads[] | select(.acknowledged | not)'\n  \
    mesh identity --controller http://127.0.0.1:8081"
)]
pub struct Arguments {
    #[command(flatten)]
    source: source::Arguments,
    /// In what form
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// A clock that is this far off is worth a look, in milliseconds: certificates allow five minutes.
const SKEW: i64 = 30_000;

/// Asks, and shows.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let mesh = super::block_on(async {
        let answers = Source::new(&arguments.source).await?.ask().await?;
        Ok::<_, source::Error>(Mesh::of(answers))
    })??;
    let text = match arguments.output {
        Output::Json => format!("{:#}\n", json!(mesh)),
        Output::Text => text(&mesh, now(), Style::of(&io::stdout())),
    };
    style::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn text(mesh: &Mesh, now: u64, style: Style) -> String {
    let label = |text: &str| (Tone::Strong, text.to_owned());
    let plain = |text: String| (Tone::Good, text);
    let mut rows = vec![vec![
        label("trust domain"),
        (Tone::Strong, mesh.trust_domain.clone()),
    ]];
    if let Some(issuer) = &mesh.issuer {
        rows.push(vec![label("signs"), authority(issuer, now)]);
    }
    rows.push(vec![label("kept in"), (Tone::Faint, mesh.place.clone())]);
    for (index, root) in mesh.roots.iter().enumerate() {
        let role = if root.role == "current" {
            String::new()
        } else {
            format!("{}: ", root.role)
        };
        let (tone, text) = authority(root, now);
        rows.push(vec![
            label(if index == 0 { "trust roots" } else { "" }),
            (tone, format!("{role}{text}")),
        ]);
    }
    rows.push(vec![label("rotation"), rotation(mesh, now)]);
    rows.extend(
        mesh.rotation
            .waiting
            .iter()
            .map(|whom| vec![label(""), (Tone::Doubtful, format!("waits for {whom}"))]),
    );
    rows.push(vec![label("controllers"), plain(mesh.replicas.join(", "))]);
    rows.extend(
        mesh.problems
            .iter()
            .map(|(name, problem)| vec![label(""), (Tone::Bad, format!("{name}: {problem}"))]),
    );
    rows.extend(mesh.silent.iter().map(|(name, why)| {
        vec![
            label(""),
            (Tone::Bad, format!("{name} does not answer: {why}")),
        ]
    }));
    let mut text = style.table(&rows);
    text.push('\n');
    if mesh.workloads.is_empty() {
        text += "no workload is connected\n";
        return text;
    }
    let headings = ["POD", "IDENTITY", "CERTIFICATE", "ENDS", "TRUSTS", "CLOCK"];
    let mut rows = vec![headings.map(label).to_vec()];
    rows.extend(
        mesh.workloads
            .iter()
            .map(|workload| cells(workload, mesh, now)),
    );
    text + &style.table(&rows)
}

/// A CA in a line; the sooner it ends the louder.
fn authority(authority: &Authority, now: u64) -> (Tone, String) {
    let fingerprint: String = authority.fingerprint.chars().take(16).collect();
    let ends = from_now(authority.not_after, now);
    let origin = if authority.own {
        "made by the mesh"
    } else {
        "an operator's"
    };
    let text = format!(
        "{} (sha256 {fingerprint}..., {origin}), ends {ends}, {}",
        authority.subject,
        stamp(authority.not_after)
    );
    (tone(made(authority), authority.not_after, now, 3), text)
}

fn rotation(mesh: &Mesh, now: u64) -> (Tone, String) {
    let rotation = &mesh.rotation;
    if is_steady(rotation) {
        return (Tone::Good, meaning(rotation).into());
    }
    let since = span(now.saturating_sub(rotation.since));
    (
        Tone::Doubtful,
        format!(
            "{} for {since} ({}): {}",
            rotation.phase,
            rotation.reason,
            meaning(rotation)
        ),
    )
}

/// Ended is bad; doubtful is what has less than one part of its life left.
fn tone(made: u64, not_after: u64, now: u64, part: u64) -> Tone {
    let left = not_after.saturating_sub(now);
    match () {
        () if left == 0 => Tone::Bad,
        () if left < not_after.saturating_sub(made) / part => Tone::Doubtful,
        () => Tone::Good,
    }
}

fn cells(workload: &Workload, mesh: &Mesh, now: u64) -> Vec<(Tone, String)> {
    let faint = |text: &str| (Tone::Faint, text.to_owned());
    let mut cells = vec![(Tone::Good, workload.name()), faint(&workload.identity)];
    if !workload.has_certificate() {
        cells.push((Tone::Bad, "none yet".into()));
        return cells;
    }
    let (made, to) = (
        workload.certificate_issued_at,
        workload.certificate_not_after,
    );
    let signed_by_current = mesh
        .issuer
        .as_ref()
        .is_none_or(|issuer| issuer.id == workload.certificate_issuer);
    let age = format!(
        "{} old{}",
        span(now.saturating_sub(made)),
        if signed_by_current {
            ""
        } else {
            ", of the former CA"
        }
    );
    cells.push((
        if signed_by_current {
            Tone::Good
        } else {
            Tone::Doubtful
        },
        age,
    ));
    // Renewed at four fifths of its life.
    cells.push((tone(made, to, now, 10), from_now(to, now)));
    cells.push(if workload.acknowledged {
        (Tone::Good, "the roots".into())
    } else {
        (Tone::Doubtful, "older roots".into())
    });
    let skew = workload.clock_skew_ms;
    let clock = match skew {
        _ if skew.abs() < 1_000 => "right".into(),
        _ => format!(
            "{} {}",
            span(skew.unsigned_abs() / 1_000),
            if skew > 0 { "ahead" } else { "behind" }
        ),
    };
    cells.push((
        if skew.abs() < SKEW {
            Tone::Good
        } else {
            Tone::Bad
        },
        clock,
    ));
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
    fn a_mesh_on_a_page() {
        let page = text(&mesh(), 4_600, Style::PLAIN);
        let expected = "\
trust domain  cluster.local
signs         CN=mesh (sha256 0123456789abcdef..., made by the mesh), ends in 99 d 22 h, 1970-04-11T00:00:00Z
kept in       Secret a/b
trust roots   CN=mesh (sha256 0123456789abcdef..., made by the mesh), ends in 99 d 22 h, 1970-04-11T00:00:00Z
rotation      no rotation is under way
controllers   controller-1

POD          IDENTITY                                CERTIFICATE  ENDS     TRUSTS     CLOCK
shop/till-1  spiffe://cluster.local/ns/shop/sa/till  55 min old   in 23 h  the roots  right
shop/new     spiffe://cluster.local/ns/shop/sa/till  none yet
";
        assert_eq!(page, expected);
    }

    #[test]
    fn what_is_not_as_it_should_be_is_said() {
        let mut mesh = mesh();
        mesh.rotation.phase = "announcing".into();
        mesh.rotation.waiting = vec!["shop/till-1 to trust the current roots".into()];
        mesh.silent.insert("controller-2".into(), "gone".into());
        mesh.problems
            .insert("controller-1".into(), "Secret a/b holds no CA".into());
        mesh.workloads[0].acknowledged = false;
        mesh.workloads[0].certificate_issuer = "bb".into();
        mesh.workloads[0].clock_skew_ms = -90_000;
        let page = text(&mesh, 4_600, Style::PLAIN);
        for part in [
            "announcing for 1 h 16 min",
            "waits for shop/till-1 to trust",
            "controller-2 does not answer: gone",
            "controller-1: Secret a/b holds no CA",
            "of the former CA",
            "older roots",
            "1 min 30 s behind",
        ] {
            assert!(page.contains(part), "{part} is not in:\n{page}");
        }
    }
}
