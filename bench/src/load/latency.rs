//! Requests at a constant rate. If a connection is busy when a request is due, its latency includes
//! the delay (no coordinated omission).

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use nix::sys::prctl::set_timerslack;

use super::{Tally, Window, http1};
use crate::cases::Exchange;

/// The first message of clients of PostgreSQL (Frontend/Backend Protocol, SSLRequest).
const SSL_REQUEST: &[u8] = &[0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];

/// A constant rate of requests.
#[derive(Clone, Copy)]
pub struct Rate {
    /// Requests per second.
    per_second: u32,
    /// One thread each, round robin.
    clients: u32,
    /// Each exchange has a connection of its own, which counts as a part of its latency.
    new_connections: Option<Exchange>,
}

impl Rate {
    /// On so many connections.
    pub fn on_connections(per_second: u32, connections: u32) -> Self {
        Self {
            per_second,
            clients: connections,
            new_connections: None,
        }
    }

    /// On a new connection for each exchange, by so many threads.
    pub fn on_new_connections(exchange: Exchange, per_second: u32, clients: u32) -> Self {
        Self {
            per_second,
            clients,
            new_connections: Some(exchange),
        }
    }
}

/// Sends requests at this rate. Returns the sorted latencies.
pub fn constant_rate<T>(
    rate: Rate,
    target: SocketAddr,
    window: Window,
    probe: impl Fn() -> Result<T>,
) -> Result<(Tally<T>, Vec<Duration>)> {
    let step = Duration::from_secs(1) / rate.per_second;
    // All connections are open by then.
    let start = Instant::now() + Duration::from_millis(100);
    let (count_from, end) = (
        start + window.warm_up,
        start + window.warm_up + window.length,
    );
    thread::scope(|scope| {
        let turns: Vec<_> = (0..rate.clients)
            .map(|turn| {
                let schedule = Schedule {
                    first: start + step * turn,
                    step: step * rate.clients,
                    new_connections: rate.new_connections,
                    count_from,
                    end,
                };
                scope.spawn(move || one_connection(target, schedule))
            })
            .collect();
        sleep_until(count_from);
        let (before, began) = (probe()?, Instant::now());
        sleep_until(end);
        let (after, elapsed) = (probe()?, began.elapsed());
        let mut times = Vec::new();
        for turn in turns {
            times.extend(
                turn.join()
                    .map_err(|_| anyhow!("a connection's thread panicked"))??,
            );
        }
        ensure!(
            !times.is_empty(),
            "no response within {:.1} s",
            elapsed.as_secs_f64()
        );
        times.sort_unstable();
        Ok((
            Tally {
                count: times.len() as u64,
                elapsed,
                before,
                after,
            },
            times,
        ))
    })
}

/// Nearest-rank percentile of sorted times; `share` is from 0 to 1.
pub fn percentile(times: &[Duration], share: f64) -> Duration {
    let rank = (times.len() as f64 * share).ceil() as usize;
    times
        .get(rank.clamp(1, times.len().max(1)) - 1)
        .copied()
        .unwrap_or_default()
}

#[derive(Clone, Copy)]
struct Schedule {
    first: Instant,
    step: Duration,
    new_connections: Option<Exchange>,
    count_from: Instant,
    end: Instant,
}

fn one_connection(target: SocketAddr, schedule: Schedule) -> Result<Vec<Duration>> {
    // Precise wake-ups, within a microsecond.
    set_timerslack(1000).context("set the timer slack")?;
    let mut stream = connect(target)?;
    let mut times = Vec::new();
    let mut input = Vec::new();
    let mut due = schedule.first;
    while due < schedule.end {
        let late = Instant::now() > due;
        sleep_until(due);
        let start = if late { due } else { Instant::now() };
        if schedule.new_connections.is_some() {
            stream = connect(target)?;
        }
        match schedule.new_connections {
            None | Some(Exchange::Http1 | Exchange::TwoWrites) => {
                stream.write_all(http1::REQUEST).context("send a request")?;
                read_response(&mut stream, &mut input)?;
            }
            Some(Exchange::ClientFirst) => {
                stream.write_all(SSL_REQUEST).context("send bytes")?;
                read_answer(&mut stream)?;
            }
            Some(Exchange::ServerFirst) => read_answer(&mut stream)?,
        }
        if due >= schedule.count_from {
            times.push(start.elapsed());
        }
        due += schedule.step;
    }
    Ok(times)
}

fn connect(target: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(target).with_context(|| format!("connect to {target}"))?;
    stream.set_nodelay(true).context("set TCP_NODELAY")?;
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .context("set a read timeout")?;
    Ok(stream)
}

fn read_answer(stream: &mut TcpStream) -> Result<()> {
    let read = stream.read(&mut [0; 4096]).context("read an answer")?;
    ensure!(read > 0, "connection closed before the answer");
    Ok(())
}

fn read_response(stream: &mut TcpStream, input: &mut Vec<u8>) -> Result<()> {
    let mut chunk = [0; 4096];
    input.clear();
    loop {
        let read = stream.read(&mut chunk).context("read a response")?;
        ensure!(
            read > 0,
            "connection closed before the response was complete"
        );
        input.extend_from_slice(&chunk[..read]);
        if http1::is_complete(input)? {
            return Ok(());
        }
    }
}

fn sleep_until(when: Instant) {
    thread::sleep(when.saturating_duration_since(Instant::now()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_is_nearest_rank() {
        let times: Vec<_> = (1..=200).map(Duration::from_micros).collect();
        assert_eq!(percentile(&times, 0.5), Duration::from_micros(100));
        assert_eq!(percentile(&times, 0.99), Duration::from_micros(198));
        assert_eq!(percentile(&times[..1], 0.99), Duration::from_micros(1));
        assert_eq!(percentile(&[], 0.5), Duration::ZERO);
    }
}
