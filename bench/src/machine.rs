//! What else the machine does while we measure, and what it is. On a busy machine figures and even ratios mislead, so the run says.

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

/// CPU time up to a moment, of the whole machine and of what belongs to the run.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    capacity: Duration,
    busy: Duration,
    own: Duration,
}

impl Reading {
    /// Takes one; `meters` are all processes of the run but this one.
    pub fn take(meters: &[Meter]) -> Result<Self> {
        let stat = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
        let ticks = sysconf(SysconfVar::CLK_TCK)
            .context("ask for the clock's ticks")?
            .context("the clock has no ticks")?;
        let (capacity, busy) = cpu_line(&stat).context("/proc/stat has no cpu line")?;
        let time = |ticks_used: u64| Duration::from_secs_f64(ticks_used as f64 / ticks as f64);
        let mut own = Duration::ZERO;
        // Children that have ended: what they used is in no meter any more.
        for who in [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN] {
            let usage = getrusage(who).context("ask for our own CPU time")?;
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

    /// The share of the machine that others took between this one and `after`, 0 to 1: other programs, and other machines on the
    /// same host where the kernel can tell.
    pub fn others_until(&self, after: &Reading) -> f64 {
        let between =
            |later: Duration, earlier: Duration| later.saturating_sub(earlier).as_secs_f64();
        let others = between(after.busy, self.busy) - between(after.own, self.own);
        (others / between(after.capacity, self.capacity).max(0.01)).clamp(0.0, 1.0)
    }
}

/// All ticks, and those in which a CPU was taken: user, nice, system, irq, softirq, steal.
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

/// For the JSON file: figures of different machines are not to be compared.
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
    fn idle_and_waiting_are_not_busy() {
        assert_eq!(
            cpu_line("cpu  1 2 3 100 50 4 5 6 0 0\ncpu0 1 2 3"),
            Some((171, 21))
        );
        assert_eq!(cpu_line("intr 1"), None);
    }

    #[test]
    fn what_is_ours_is_not_of_others() {
        let at = |capacity, busy, own| Reading {
            capacity: Duration::from_secs(capacity),
            busy: Duration::from_secs(busy),
            own: Duration::from_secs(own),
        };
        assert_eq!(at(10, 2, 1).others_until(&at(20, 8, 3)), 0.4);
        assert_eq!(at(10, 2, 1).others_until(&at(20, 3, 3)), 0.0);
    }
}
