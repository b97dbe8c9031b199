//! CPU usage of other programs during a measurement, and a description of the machine.

use std::{fs, thread, time::Duration};

use anyhow::{Context, Result};
use nix::{
    sys::{
        resource::{UsageWho, getrusage},
        time::TimeValLike,
    },
    unistd::{SysconfVar, sysconf},
};
use serde_json::{Value, json};

use crate::process::Meter;

/// CPU times of the whole machine and of this run.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    capacity: Duration,
    busy: Duration,
    own: Duration,
}

impl Reading {
    /// Reads the CPU times; `meters` are the child processes of the run.
    pub fn take(meters: &[Meter]) -> Result<Self> {
        let stat = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
        let ticks = sysconf(SysconfVar::CLK_TCK)
            .context("read the clock tick rate")?
            .context("the clock tick rate is unknown")?;
        let (capacity, busy) = cpu_line(&stat).context("/proc/stat has no cpu line")?;
        let time = |ticks_used: u64| Duration::from_secs_f64(ticks_used as f64 / ticks as f64);
        let mut own = Duration::ZERO;
        // RUSAGE_CHILDREN covers exited children, which have no meter.
        for who in [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN] {
            let usage = getrusage(who).context("read the own CPU time")?;
            own += Duration::from_micros(
                (usage.user_time() + usage.system_time())
                    .num_microseconds()
                    .unsigned_abs(),
            );
        }
        for meter in meters {
            own += meter.cpu()?;
        }
        Ok(Reading {
            capacity: time(capacity),
            busy: time(busy),
            own,
        })
    }

    /// CPU share of other programs between this reading and `after`, from 0 to 1. Includes steal
    /// time.
    pub fn foreign_cpu_share(&self, after: &Reading) -> f64 {
        let between =
            |later: Duration, earlier: Duration| later.saturating_sub(earlier).as_secs_f64();
        let foreign = between(after.busy, self.busy) - between(after.own, self.own);
        (foreign / between(after.capacity, self.capacity).max(0.01)).clamp(0.0, 1.0)
    }
}

/// Total ticks, and busy ticks: user, nice, system, irq, softirq, steal.
fn cpu_line(stat: &str) -> Option<(u64, u64)> {
    let numbers: Vec<u64> = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace()
        .take(8)
        .map_while(|text| text.parse().ok())
        .collect();
    let [_, _, _, idle, io_wait, ..] = numbers[..] else {
        return None;
    };
    let all = numbers.iter().sum();
    Some((all, all - idle - io_wait))
}

/// Description of the machine for the JSON report.
pub fn description() -> Value {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpu = read("/proc/cpuinfo");
    let model = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .unwrap_or_default();
    json!({
        "cpu": model.trim_start_matches(['\t', ':', ' ']),
        "cpus": thread::available_parallelism().map_or(0, usize::from),
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_and_iowait_are_not_busy() {
        assert_eq!(
            cpu_line("cpu  1 2 3 100 50 4 5 6 0 0\ncpu0 1 2 3"),
            Some((171, 21))
        );
        assert_eq!(cpu_line("intr 1"), None);
    }

    #[test]
    fn own_cpu_time_is_not_foreign() {
        let at = |capacity, busy, own| Reading {
            capacity: Duration::from_secs(capacity),
            busy: Duration::from_secs(busy),
            own: Duration::from_secs(own),
        };
        assert_eq!(at(10, 2, 1).foreign_cpu_share(&at(20, 8, 3)), 0.4);
        assert_eq!(at(10, 2, 1).foreign_cpu_share(&at(20, 3, 3)), 0.0);
    }
}
