//! Every kind of load against the origin server, without proxies, in namespaces of its own; and that these are gone afterwards.
//!
//! Needs root. Without it, it says so and is skipped, but not in CI.

use std::{
    env,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::Result;
use diy_mesh_bench::{
    cases::{CASES, Case, Kind, Metric, Side},
    config::Programs,
    load::Window,
    measure::measure,
    network::{Pair, Site},
    sides::Running,
};

/// Enough for each load to be answered on a busy machine; no figure is judged.
const WINDOW: Window = Window {
    warm_up: Duration::from_millis(50),
    length: Duration::from_secs(1),
};

#[test]
fn each_load_is_answered_and_nothing_is_left() -> Result<()> {
    if !may_make_namespaces() {
        return Ok(());
    }
    let site = Site::clear("dmbt-")?;
    let outcome = direct_loads(&site).and_then(|()| processes_end(&site));
    site.close()?;
    outcome?;
    assert!(
        !Path::new("/run/netns/dmbt-direct-client").exists()
            && !Path::new("/run/netns/dmbt-sleeper-client").exists()
    );
    Ok(())
}

fn direct_loads(site: &Site) -> Result<()> {
    let mut direct = Running::start(Side::Direct, &Programs::default(), site, None)?;
    let loads = CASES
        .iter()
        .filter(|case| !matches!(case.kind, Kind::Start { .. }) && !case.kind.is_alone());
    for case in loads {
        let numbers = measure(case, &mut direct, WINDOW)?;
        let expected = main_metric(case);
        assert!(
            numbers
                .iter()
                .any(|&(metric, value)| metric == expected && value > 0.0),
            "{}: {numbers:?}",
            case.name
        );
        assert!(
            numbers.iter().all(|number| number.0 != Metric::Cpu),
            "{}: no proxy, no cost: {numbers:?}",
            case.name
        );
    }
    Ok(())
}

/// Closing the site ends what runs in its namespaces, and lets nothing else start there.
fn processes_end(site: &Site) -> Result<()> {
    let pair = Pair::make("sleeper", site)?;
    let mut sleeper = pair
        .client
        .spawn(Command::new("sleep").arg("1000").stdin(Stdio::null()))?;
    site.close()?;
    assert!(!sleeper.wait()?.success());
    assert!(
        pair.client
            .spawn(Command::new("true").stdin(Stdio::null()))
            .is_err()
    );
    Ok(())
}

fn main_metric(case: &Case) -> Metric {
    match case.kind {
        Kind::Latency { .. } => Metric::LatencyP50,
        Kind::Tcp => Metric::Gigabits,
        _ => Metric::Requests,
    }
}

fn may_make_namespaces() -> bool {
    let root = nix::unistd::geteuid().is_root();
    assert!(
        root || env::var_os("CI").is_none(),
        "in CI this test has to run as root"
    );
    if !root {
        eprintln!("skipped: it makes network namespaces, run it as root");
    }
    root
}
