//! Measurement of one case on one side.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result, ensure};

use crate::{
    cases::{Case, Kind, Metric, Payload, Protocol},
    load::{self, Rate, Tally, Window},
    process::Meter,
    sides::{Destinations, Running},
};

/// Delay before idle memory is read.
const SETTLE_TIME: Duration = Duration::from_millis(500);

/// Results of one measurement.
pub type Numbers = Vec<(Metric, f64)>;

/// CPU times of the client's and the server's proxy; empty on the direct side.
type Cpu = Vec<Duration>;

/// Measures `case` on `running` once.
pub fn measure(case: &Case, running: &mut Running, window: Window) -> Result<Numbers> {
    running.ensure_running()?;
    let numbers = match case.kind {
        Kind::Start {
            idle_connections,
            protocol,
        } => start(running, idle_connections, protocol),
        Kind::Destinations { number } => destinations(running, number),
        Kind::Tcp(payload) => tcp(running, window, payload),
        Kind::Latency { .. } | Kind::FirstAnswer { .. } => latency(case.kind, running, window),
        Kind::Closed(_) | Kind::Connect { .. } => requests(case, running, window),
        Kind::Certificates { .. } | Kind::Records(_) => unreachable!("standalone case"),
    };
    let ended = running.ensure_running();
    numbers
        .and_then(|numbers| ended.map(|()| numbers))
        .with_context(|| format!("{} through {}", case.name, running.side.name()))
}

/// Generates only the load of a case, for profiling.
pub fn load_only(case: &Case, running: &Running, window: Window) -> Result<()> {
    match case.kind {
        Kind::Start {
            idle_connections,
            protocol,
        } => {
            let (target, settle) = (running.http(), window.warm_up + window.length);
            running.pair.client.enter(|| {
                load::idle_connections(idle_connections, target, protocol, settle, || Ok(()))
            })
        }
        Kind::Destinations { number } => running.pair.client.enter(|| {
            let all = [Destinations::Plain, Destinations::WithPolicy];
            let mut all = all.into_iter().flat_map(|one| one.addresses(number));
            all.try_for_each(load::one_request)
        }),
        Kind::Tcp(payload) => tcp(running, window, payload).map(drop),
        Kind::Latency { .. } | Kind::FirstAnswer { .. } => {
            latency(case.kind, running, window).map(drop)
        }
        Kind::Closed(_) | Kind::Connect { .. } => requests(case, running, window).map(drop),
        Kind::Certificates { .. } | Kind::Records(_) => unreachable!("standalone case"),
    }
}

fn start(running: &mut Running, connections: usize, protocol: Protocol) -> Result<Numbers> {
    running.restart()?;
    let target = running.http();
    let client = running.pair.client.clone();
    let Some(proxies) = running.proxies() else {
        return Ok(Vec::new());
    };
    let (ready, meter) = (proxies.ready, proxies.first()?.meter());
    let resident_with = |connections| {
        client.enter(|| {
            load::idle_connections(connections, target, protocol, SETTLE_TIME, || {
                meter.resident()
            })
        })
    };
    // One extra connection: the idle figure includes one-time allocations.
    let idle = resident_with(1)?;
    let more = resident_with(connections)?;
    Ok(vec![
        (Metric::Ready, ready.as_secs_f64() * 1e3),
        (Metric::IdleMemory, megabytes(idle)),
        (
            Metric::IdleConnectionsMemory,
            megabytes(more) - megabytes(idle),
        ),
    ])
}

fn destinations(running: &mut Running, number: u16) -> Result<Numbers> {
    running.restart()?;
    let target = running.http();
    let client = running.pair.client.clone();
    let Some(proxies) = running.proxies() else {
        return Ok(Vec::new());
    };
    let meter = proxies.first()?.meter();
    let resident_after = |mut targets: Vec<SocketAddr>| {
        client.enter(|| {
            let last = targets.pop().context("a case has destinations")?;
            targets.into_iter().try_for_each(load::one_request)?;
            load::idle_connections(1, last, Protocol::Http1, SETTLE_TIME, || meter.resident())
        })
    };
    let idle = resident_after(vec![target])?;
    let plain = resident_after(Destinations::Plain.addresses(number).collect())?;
    let all = resident_after(Destinations::WithPolicy.addresses(number).collect())?;
    let each = |before, after| (megabytes(after) - megabytes(before)) * 1e3 / f64::from(number);
    Ok(vec![
        (Metric::DestinationMemory, each(idle, plain)),
        (Metric::PolicyMemory, each(plain, all)),
    ])
}

fn requests(case: &Case, running: &Running, window: Window) -> Result<Numbers> {
    let (mut target, meters) = (running.http(), running.meters());
    if let Kind::Closed(traffic) = case.kind
        && case.kind.is_mesh_only()
    {
        target.set_port(traffic.routes.port());
    }
    let probe = || {
        Ok((
            cpu(&meters)?,
            meters.first().map(Meter::resident).transpose()?,
        ))
    };
    let tally = running.pair.client.enter(|| match case.kind {
        Kind::Connect { workers } => load::new_connections(workers, target, window, probe),
        Kind::Closed(traffic) => load::closed_loop(traffic, target, window, probe),
        _ => unreachable!("measured elsewhere"),
    })?;
    let mut numbers = vec![(
        Metric::Requests,
        tally.count as f64 / tally.elapsed.as_secs_f64(),
    )];
    numbers.extend(cpu_per_request(
        tally.count,
        &tally.before.0,
        &tally.after.0,
    )?);
    if matches!(case.kind, Kind::Closed(traffic) if traffic.connections > 100) {
        numbers.extend(
            tally
                .after
                .1
                .map(|resident| (Metric::LoadedMemory, megabytes(resident))),
        );
    }
    Ok(numbers)
}

fn latency(kind: Kind, running: &Running, window: Window) -> Result<Numbers> {
    let meters = running.meters();
    let (target, rate) = match kind {
        Kind::Latency { rate, connections } => {
            (running.http(), Rate::on_connections(rate, connections))
        }
        Kind::FirstAnswer {
            exchange,
            rate,
            clients,
        } => (
            running.address(exchange.service_port(), exchange.server_port()),
            Rate::on_new_connections(exchange, rate, clients),
        ),
        _ => unreachable!("measured elsewhere"),
    };
    let (tally, times) = running
        .pair
        .client
        .enter(|| load::constant_rate(rate, target, window, || cpu(&meters)))?;
    let at = |share| load::percentile(&times, share).as_secs_f64() * 1e6;
    let mut numbers = vec![
        (Metric::LatencyP50, at(0.5)),
        (Metric::LatencyP99, at(0.99)),
    ];
    numbers.extend(cpu_per_request(tally.count, &tally.before, &tally.after)?);
    Ok(numbers)
}

fn tcp(running: &Running, window: Window, payload: Payload) -> Result<Numbers> {
    let (target, meters, server) = (running.sink(), running.meters(), &running.server);
    let tally: Tally<Cpu> = running.pair.client.enter(|| {
        let arrived = || server.received();
        load::stream_bytes(target, payload, window, arrived, || cpu(&meters))
    })?;
    let gigabytes = tally.count as f64 / 1e9;
    let mut numbers = vec![(
        Metric::Gigabits,
        gigabytes * 8.0 / tally.elapsed.as_secs_f64(),
    )];
    if let Some(used) = used(&tally.before, &tally.after)? {
        numbers.push((Metric::CpuPerGigabyte, used.as_secs_f64() / gigabytes));
    }
    Ok(numbers)
}

fn cpu_per_request(requests: u64, before: &Cpu, after: &Cpu) -> Result<Option<(Metric, f64)>> {
    let used = used(before, after)?;
    Ok(used.map(|used| {
        (
            Metric::Cpu,
            used.as_secs_f64() * 1e6 / requests as f64 / after.len() as f64,
        )
    }))
}

/// CPU time of the proxies between two readings. Fails if one used none: then the traffic bypassed
/// it.
fn used(before: &Cpu, after: &Cpu) -> Result<Option<Duration>> {
    let each: Vec<_> = before
        .iter()
        .zip(after)
        .map(|(before, after)| after.saturating_sub(*before))
        .collect();
    ensure!(
        !each.contains(&Duration::ZERO),
        "a proxy used no CPU time: the traffic bypasses it"
    );
    Ok((!each.is_empty()).then(|| each.iter().sum()))
}

fn cpu(meters: &[Meter]) -> Result<Cpu> {
    meters.iter().map(Meter::cpu).collect()
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn cpu_is_per_request_and_proxy() {
        let number = cpu_per_request(100, &vec![MS, MS], &vec![MS * 2, MS * 4]).unwrap();
        assert_eq!(number, Some((Metric::Cpu, 20.0)));
    }

    #[test]
    fn idle_proxy_under_load_is_an_error() {
        assert!(used(&vec![MS, MS], &vec![MS * 2, MS]).is_err());
    }

    #[test]
    fn direct_side_has_no_cpu_cost() {
        assert_eq!(used(&vec![], &vec![]).unwrap(), None);
    }
}
