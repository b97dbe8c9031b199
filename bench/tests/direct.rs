//! Every kind of load against the origin server without proxies, and the removal of the namespaces.
//!
//! Requires root. Skipped without root, except in CI, where it fails.

use std::{
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
    network::{NamespaceSet, Pair},
    sides::Running,
};
use diy_mesh_testkit::is_root;

/// Long enough for responses on a busy machine. The test does not check performance.
const WINDOW: Window = Window {
    warm_up: Duration::from_millis(50),
    length: Duration::from_secs(1),
};

#[test]
fn runs_each_load_and_removes_namespaces() -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    let namespaces = NamespaceSet::clear("dmbt-")?;
    let outcome = direct_loads(&namespaces).and_then(|()| processes_end(&namespaces));
    namespaces.close()?;
    outcome?;
    assert!(
        !Path::new("/run/netns/dmbt-direct-client").exists()
            && !Path::new("/run/netns/dmbt-sleeper-client").exists()
    );
    Ok(())
}

fn direct_loads(namespaces: &NamespaceSet) -> Result<()> {
    let mut direct = Running::start(Side::Direct, &Programs::default(), namespaces, None)?;
    let loads = CASES
        .iter()
        .filter(|case| !matches!(case.kind, Kind::Start { .. }) && !case.kind.is_standalone())
        .filter(|case| case.kind.is_measured_on(Side::Direct));
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
            "{}: CPU cost without a proxy: {numbers:?}",
            case.name
        );
    }
    Ok(())
}

/// `close` kills the processes in the namespaces and prevents new ones.
fn processes_end(namespaces: &NamespaceSet) -> Result<()> {
    let pair = Pair::create("sleeper", namespaces)?;
    let mut sleeper = pair
        .client
        .spawn(Command::new("sleep").arg("1000").stdin(Stdio::null()))?;
    namespaces.close()?;
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
        Kind::Latency { .. } | Kind::FirstAnswer { .. } => Metric::LatencyP50,
        Kind::Tcp(_) => Metric::Gigabits,
        _ => Metric::Requests,
    }
}
