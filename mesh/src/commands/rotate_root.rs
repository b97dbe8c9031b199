//! `mesh rotate-root`: requests a root rotation, or its abandonment, and shows the progress. The
//! controller performs the rotation, so this command can be interrupted and restarted at any time.

use std::{io, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Result, bail};
use clap::Args;
use tokio::time::{Instant, sleep};

use crate::terminal::{self, Colors, TextStyle};
use crate::{
    cluster,
    controller::{self, Controllers},
    identity::{
        request::{Request, RequestTarget},
        status::{Mesh, Rotation, describe_phase, is_steady, workload_name},
    },
    time::{format_duration, format_timestamp},
};

/// The arguments of `mesh rotate-root`.
#[derive(Args, Debug)]
#[command(
    mut_arg("namespace", cluster::no_namespace),
    after_help = "The controller announces the new root first. Its CA issues certificates once all connected proxies trust it. The\n\
    old root is removed once none of its certificates is in use. No request fails, and no pod restarts.\n\n\
    Examples:\n  mesh rotate-root              start a rotation, or watch the current one; Ctrl-C stops watching only\n  \
    mesh rotate-root --no-wait    start a rotation without watching it\n  \
    mesh rotate-root --abandon    return to the previous root\n  \
    mesh rotate-root --force      after the theft of a key: trust only a new root, at once"
)]
pub struct Arguments {
    #[command(flatten)]
    controller: controller::Arguments,
    /// Return to the previous root
    #[arg(long)]
    abandon: bool,
    /// Trust only a new root, at once; breaks connections until the proxies have new certificates
    #[arg(long, conflicts_with = "abandon")]
    force: bool,
    /// Watch until the rotation is complete (default)
    #[arg(long, overrides_with = "no_wait")]
    wait: bool,
    /// Exit when the controller has answered
    #[arg(long)]
    no_wait: bool,
    /// Directory of the controller's CA, instead of a Secret in a cluster
    #[arg(long, value_name = "FOLDER", requires = "controller", conflicts_with_all = ["context", "mesh_namespace"])]
    ca_folder: Option<PathBuf>,
}

/// The interval of status queries.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The time for the controller to accept a request and for all replicas to report its answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Submits the request and watches the rotation.
pub async fn run(arguments: &Arguments) -> Result<ExitCode> {
    tokio::select! {
        done = rotate(arguments) => done,
        interrupted = tokio::signal::ctrl_c() => {
            interrupted?;
            print(TextStyle::Bold, "the rotation continues: watch it with `mesh rotate-root`, or abandon it with `mesh rotate-root --abandon`");
            Ok(ExitCode::from(130))
        }
    }
}

async fn rotate(arguments: &Arguments) -> Result<ExitCode> {
    let controllers = Controllers::new(&arguments.controller).await?;
    let target = match (&arguments.ca_folder, controllers.cluster()) {
        (Some(directory), _) => RequestTarget::Directory(directory.clone()),
        (None, Some(cluster)) => RequestTarget::Cluster(Box::new(cluster.clone())),
        (None, None) => {
            bail!("--controller requires --ca-folder, the directory of the controller's CA")
        }
    };
    let request = match (arguments.abandon, arguments.force) {
        (true, _) => Request::Abandon,
        (_, true) => Request::Force,
        _ => Request::Start,
    };
    let before = Mesh::merge(controllers.identity().await?);
    match intent(request, &before.rotation) {
        Intent::Reject(reason) => bail!("{reason}"),
        Intent::Watch => print(TextStyle::Bold, "the rotation is already in progress"),
        Intent::Submit => {
            if request == Request::Force {
                print(TextStyle::Bold, FORCE_CONSEQUENCES);
            }
            target.submit(request).await?;
            let answer = wait_for_answer(&controllers, &target, &before.rotation).await?;
            if let Some(reason) = answer.strip_prefix("refused: ") {
                bail!("the controller rejected the request: {reason}");
            }
            print(TextStyle::Bold, &answer);
        }
    }
    if arguments.no_wait {
        let text = "watch the rotation with `mesh rotate-root`";
        print(TextStyle::Bold, text);
        return Ok(ExitCode::SUCCESS);
    }
    let (mesh, elapsed) = watch(&controllers, request).await;
    let root = mesh.issuer.map_or(String::new(), |issuer| {
        let until = format_timestamp(issuer.not_after);
        format!("; issuer {} until {until}", issuer.subject)
    });
    let (elapsed, reason) = (format_duration(elapsed.as_secs()), mesh.rotation.reason);
    terminal::print(&format!("done after {elapsed}: {reason}{root}\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// The effects of a forced rotation.
const FORCE_CONSEQUENCES: &str = "the new root replaces all others at once: connections between proxies fail until both have a new certificate, \
    for some seconds; a proxy without a connection to a controller fails until it reconnects, which takes up to two minutes; open connections \
    stay open, those of HTTP for at most an hour";

/// The action for a request in the current phase.
#[derive(Debug, PartialEq, Eq)]
enum Intent {
    Submit,
    /// The requested rotation is already in progress.
    Watch,
    Reject(&'static str),
}

fn intent(request: Request, rotation: &Rotation) -> Intent {
    match (request, is_steady(rotation), rotation.reverting) {
        (Request::Force, _, _)
        | (Request::Start, true, _)
        | (Request::Start, false, true)
        | (Request::Abandon, false, false) => Intent::Submit,
        (Request::Start, false, false) | (Request::Abandon, false, true) => Intent::Watch,
        (Request::Abandon, true, _) => Intent::Reject("no rotation is in progress"),
    }
}

/// Waits until the controller accepts the request and reports its answer.
async fn wait_for_answer(
    controllers: &Controllers,
    target: &RequestTarget,
    before: &Rotation,
) -> Result<String> {
    let deadline = Instant::now() + REQUEST_TIMEOUT;
    while target.pending().await? {
        if Instant::now() > deadline {
            bail!(
                "no controller accepted the request within {} s: check that one is running and uses this CA, for example with `mesh check`",
                REQUEST_TIMEOUT.as_secs()
            );
        }
        sleep(POLL_INTERVAL / 2).await;
    }
    loop {
        // The controller may be restarting, so errors are retried.
        let current = controllers
            .identity()
            .await
            .map(|answers| Mesh::merge(answers).rotation);
        match current {
            // A repeated answer is not distinguishable, so it is accepted at the deadline.
            Ok(current) if differs(&current, before) || Instant::now() > deadline => {
                return Ok(current.answer);
            }
            Err(error) if Instant::now() > deadline => return Err(error),
            _ => sleep(POLL_INTERVAL / 2).await,
        }
    }
}

fn differs(current: &Rotation, before: &Rotation) -> bool {
    (&current.phase, current.since) != (&before.phase, before.since)
        || (current.reverting, &current.answer) != (before.reverting, &before.answer)
}

/// Prints each phase and what it waits for until the rotation is complete. After a forced one,
/// until all replicas respond and all connected proxies have a new certificate.
async fn watch(controllers: &Controllers, request: Request) -> (Mesh, Duration) {
    let started_at = Instant::now();
    let (mut phase, mut reported) = (String::new(), String::new());
    loop {
        let progress = match controllers.identity().await {
            Ok(answers) => {
                let mesh = Mesh::merge(answers);
                let outdated = match request {
                    Request::Force => outdated(&mesh),
                    _ => Vec::new(),
                };
                if is_steady(&mesh.rotation) && outdated.is_empty() {
                    return (mesh, started_at.elapsed());
                }
                let description = describe_phase(&mesh.rotation);
                let heading = format!("{}: {description}", mesh.rotation.phase);
                if heading != phase {
                    print(TextStyle::Bold, &heading);
                    phase = heading;
                }
                let waiting = [mesh.rotation.waiting, outdated].concat();
                describe_progress(&waiting, mesh.rotation.waiting_omitted)
            }
            Err(error) => format!("{error}; retrying"),
        };
        if !progress.is_empty() && without_seconds(&progress) != reported {
            reported = without_seconds(&progress);
            print(TextStyle::Warning, &format!("  {progress}"));
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// The replicas that did not respond, and the connected workloads without the current roots or a
/// certificate of the issuer. The replica that has the new CA may be the one that did not respond.
fn outdated(mesh: &Mesh) -> Vec<String> {
    let issuer = mesh.issuer.as_ref().map(|issuer| &issuer.id);
    let unreachable = mesh.unreachable.iter();
    let unreachable =
        unreachable.map(|(name, error)| format!("replica {name} to respond: {error}"));
    let outdated = mesh
        .workloads
        .iter()
        .filter(|one| !one.acknowledged || Some(&one.certificate_issuer) != issuer);
    let outdated = outdated.map(|one| format!("{} to renew its certificate", workload_name(one)));
    unreachable.chain(outdated).collect()
}

/// Describes the first item that a phase waits for and the number of others, which `mesh identity`
/// lists.
fn describe_progress(waiting: &[String], omitted: u64) -> String {
    let Some((first, others)) = waiting.split_first() else {
        return String::new();
    };
    match others.len() as u64 + omitted {
        0 => format!("waiting for {first}"),
        more => format!("waiting for {first} and {more} more"),
    }
}

/// Removes countdowns in seconds, so that texts that differ only in them are equal.
fn without_seconds(text: &str) -> String {
    let mut words: Vec<&str> = text.split(' ').collect();
    for index in 1..words.len() {
        if words[index] == "s" && words[index - 1].bytes().all(|byte| byte.is_ascii_digit()) {
            words[index - 1] = "";
        }
    }
    words.join(" ")
}

/// Prints to standard error. Ignores errors.
fn print(style: TextStyle, text: &str) {
    let text = Colors::of(&io::stderr()).paint(style, text);
    terminal::note(&text);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::status::{Authority, Workload};

    fn rotation(phase: &str, reverting: bool) -> Rotation {
        Rotation {
            phase: phase.into(),
            reverting,
            ..Rotation::default()
        }
    }

    #[test]
    fn watches_a_rotation_in_progress_instead_of_requesting_it_again() {
        for (request, phase, reverting, expected) in [
            (Request::Start, "steady", false, Intent::Submit),
            (Request::Start, "announcing", false, Intent::Watch),
            (Request::Start, "switched", false, Intent::Watch),
            (Request::Start, "announcing", true, Intent::Submit),
            (Request::Abandon, "switched", false, Intent::Submit),
            (Request::Abandon, "announcing", true, Intent::Watch),
            (Request::Force, "announcing", false, Intent::Submit),
        ] {
            assert_eq!(
                intent(request, &rotation(phase, reverting)),
                expected,
                "{request:?} {phase} {reverting}"
            );
        }
        assert!(matches!(
            intent(Request::Abandon, &rotation("steady", false)),
            Intent::Reject(_)
        ));
    }

    #[test]
    fn waits_for_replicas_that_may_have_a_newer_issuer() {
        let workload = |issuer: &str| Workload {
            namespace: "shop".into(),
            pod: "till".into(),
            acknowledged: true,
            certificate_issuer: issuer.into(),
            ..Workload::default()
        };
        let mut mesh = Mesh {
            issuer: Some(Authority {
                id: "aa".into(),
                ..Authority::default()
            }),
            workloads: vec![workload("aa")],
            ..Mesh::default()
        };
        assert_eq!(outdated(&mesh), Vec::<String>::new());
        mesh.unreachable.insert("a".into(), "refused".into());
        mesh.workloads.push(workload("bb"));
        assert_eq!(
            outdated(&mesh),
            [
                "replica a to respond: refused",
                "shop/till to renew its certificate"
            ]
        );
    }

    #[test]
    fn describes_waiting_and_ignores_countdowns() {
        let waiting: Vec<String> = (0..3)
            .map(|number| format!("shop/till-{number} to trust the current roots"))
            .collect();
        assert_eq!(
            describe_progress(&waiting, 17),
            "waiting for shop/till-0 to trust the current roots and 19 more"
        );
        assert_eq!(
            describe_progress(&waiting[..1], 0),
            "waiting for shop/till-0 to trust the current roots"
        );
        assert_eq!(describe_progress(&[], 0), "");
        assert_eq!(
            without_seconds("files, 75 s more"),
            without_seconds("files, 7 s more")
        );
        assert_ne!(
            without_seconds("till-1 to trust"),
            without_seconds("till-2 to trust")
        );
    }
}
