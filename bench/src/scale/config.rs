//! Command line of the scale benchmark.

use std::{
    env,
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Parser, ValueEnum, value_parser};

/// Measures the controller and the injector, each on one core: memory, fan-out, churn and a
/// restart with many subscribed proxies, certificates and injections.
///
/// The subscribers and a fake Kubernetes API server run in this process, on the other cores.
#[derive(Debug, Parser)]
#[command(name = "scale", version)]
pub struct Config {
    /// Numbers of subscribers to measure
    #[arg(long, value_delimiter = ',', value_name = "NUMBERS", default_value = "100,1000,3000,5000", value_parser = value_parser!(u32).range(1..=20_000))]
    pub subscribers: Vec<u32>,
    /// Cases to measure
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "CASES",
        default_value = "discovery,certificates,injections"
    )]
    pub only: Vec<Case>,
    /// Endpoints of the Service that all proxies subscribe to
    #[arg(long, value_name = "NUMBER", default_value_t = 1000, value_parser = value_parser!(u32).range(1..=100_000))]
    pub endpoints: u32,
    /// Single changes of that Service, each measured until the last subscriber has it
    #[arg(long, value_name = "NUMBER", default_value_t = 20, value_parser = value_parser!(u32).range(1..=1000))]
    pub changes: u32,
    /// Changes per second of the churn
    #[arg(long, value_name = "NUMBER", default_value_t = 20, value_parser = value_parser!(u32).range(1..=1000))]
    pub churn: u32,
    /// Length of the churn in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Restarts of the controller with kill -9; the table shows medians
    #[arg(long, value_name = "NUMBER", default_value_t = 3, value_parser = value_parser!(u32).range(0..=100))]
    pub storms: u32,
    /// Certificates and injections to measure
    #[arg(long, value_name = "NUMBER", default_value_t = 3000, value_parser = value_parser!(u32).range(1..=100_000))]
    pub requests: u32,
    /// Write all values to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Controller executable [default: in the directory of this program]
    #[arg(long, value_name = "FILE")]
    pub controller: Option<PathBuf>,
    /// Injector executable [default: in the directory of this program]
    #[arg(long, value_name = "FILE")]
    pub injector: Option<PathBuf>,
    /// Whether the table uses terminal colors.
    #[arg(skip)]
    pub color: bool,
}

/// A case to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Case {
    /// Subscribed proxies
    Discovery,
    /// First certificates, each of another pod
    Certificates,
    /// Pods that pass the webhook
    Injections,
}

impl Config {
    /// Reads the command line. Exits the process on `--help`, `--version` and invalid flags.
    pub fn from_command_line() -> Result<Config, String> {
        let mut config = Config::parse();
        config.color = io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none();
        let own = env::current_exe()
            .map_err(|error| format!("cannot determine the path of this program: {error}"))?;
        config.find_programs(own.parent().unwrap_or(Path::new("")))?;
        Ok(config)
    }

    /// Sets the default paths of the programs, and checks that they exist.
    pub fn find_programs(&mut self, folder: &Path) -> Result<(), String> {
        let measures = |cases: &[Case]| cases.iter().any(|case| self.only.contains(case));
        let needs_controller = measures(&[Case::Discovery, Case::Certificates]);
        let needs_injector = measures(&[Case::Injections]);
        for (needed, name, program) in [
            (needs_controller, "controller", &mut self.controller),
            (needs_injector, "injector", &mut self.injector),
        ] {
            let path = program.get_or_insert_with(|| folder.join(name));
            if needed && !path.is_file() {
                return Err(format!(
                    "{} does not exist: build it with `cargo build --release -p diy-mesh-{name}`, or set --{name}",
                    path.display()
                ));
            }
        }
        Ok(())
    }

    /// Changes of the large Service in one measurement.
    pub fn total_changes(&self) -> u32 {
        self.changes + self.churn * self.seconds
    }

    /// Length of the churn.
    pub fn churn_length(&self) -> Duration {
        Duration::from_secs(self.seconds.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_a_missing_program_and_its_remedy() {
        let mut config = Config::parse_from(["scale", "--only", "injections"]);
        let error = config.find_programs(Path::new("/nowhere")).unwrap_err();
        assert!(
            error.contains("/nowhere/injector") && error.contains("--injector"),
            "{error}"
        );
    }

    #[test]
    fn rejects_numbers_out_of_range() {
        for [flag, value] in [
            ["--subscribers", "100,0"],
            ["--seconds", "0"],
            ["--only", "x"],
        ] {
            assert!(Config::try_parse_from(["scale", flag, value]).is_err());
        }
    }
}
