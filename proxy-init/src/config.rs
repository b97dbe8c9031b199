//! The flags: read as text first, then checked, with every problem in one report. Nothing else in this crate looks at the environment.

use std::ffi::OsString;
use std::fmt;

use clap::Parser;

use crate::ports::{Ports, parse_port};

/// Where programs lie when nobody says so: the images have no shell that would.
const USUAL_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What the rules are to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where the proxy takes what reaches the pod.
    pub inbound_port: u16,
    /// Where the proxy takes what leaves the pod.
    pub outbound_port: u16,
    /// The proxy's admin port, which probes and scrapers reach as it is.
    pub admin_port: u16,
    /// The user that the proxy runs as: its own connections go out as they are.
    pub proxy_uid: u32,
    /// Ports of the pod that are reached without the proxy.
    pub skip_inbound_ports: Ports,
    /// Ports of others that are reached without the proxy.
    pub skip_outbound_ports: Ports,
    /// Only show the rules.
    pub dry_run: bool,
    /// The folders in which the iptables programs are looked for, as in PATH.
    pub search_path: OsString,
}

/// Everything that is wrong with the flags.
#[derive(Debug, PartialEq, Eq)]
pub struct Problems(Vec<String>);

impl Config {
    /// Reads flags and environment. Ends the process for `--help`, `--version` and unknown flags.
    pub fn read() -> Result<Self, Problems> {
        let search_path = std::env::var_os("PATH").filter(|path| !path.is_empty());
        Self::check(
            RawConfig::parse(),
            search_path.unwrap_or_else(|| USUAL_PATH.into()),
        )
    }

    fn check(raw: RawConfig, search_path: OsString) -> Result<Self, Problems> {
        let mut problems = Vec::new();
        let config = Self {
            inbound_port: required(
                &mut problems,
                "--inbound-port",
                raw.inbound_port,
                parse_port,
            ),
            outbound_port: required(
                &mut problems,
                "--outbound-port",
                raw.outbound_port,
                parse_port,
            ),
            admin_port: required(&mut problems, "--admin-port", raw.admin_port, parse_port),
            proxy_uid: required(&mut problems, "--proxy-uid", raw.proxy_uid, parse_uid),
            skip_inbound_ports: list(
                &mut problems,
                "--skip-inbound-ports",
                &raw.skip_inbound_ports,
            ),
            skip_outbound_ports: list(
                &mut problems,
                "--skip-outbound-ports",
                &raw.skip_outbound_ports,
            ),
            dry_run: raw.dry_run,
            search_path,
        };
        let named = [
            ("--inbound-port", config.inbound_port),
            ("--outbound-port", config.outbound_port),
            ("--admin-port", config.admin_port),
        ];
        for (index, (name, port)) in named.iter().enumerate() {
            // 0 stands for a port that is wrong and has been named already.
            for (other, _) in named[..index]
                .iter()
                .filter(|(_, taken)| taken == port && *port != 0)
            {
                problems.push(format!("{name}: `{port}` is the port of {other} too"));
            }
        }
        if problems.is_empty() {
            Ok(config)
        } else {
            Err(Problems(problems))
        }
    }

    #[cfg(test)]
    pub(crate) fn example() -> Self {
        Self {
            inbound_port: 4000,
            outbound_port: 5000,
            admin_port: 4001,
            proxy_uid: 1337,
            skip_inbound_ports: Ports::parse("25,9000-9100").expect("valid"),
            skip_outbound_ports: Ports::parse("3306").expect("valid"),
            dry_run: false,
            search_path: USUAL_PATH.into(),
        }
    }
}

/// The flags as they came: text, none of it checked.
#[derive(Debug, Default, Parser)]
#[command(
    name = "proxy-init",
    version,
    about = "Redirects the TCP traffic of a network namespace to the proxy",
    long_about = "Redirects the TCP traffic of the network namespace that it is started in to the proxy, IPv4 and IPv6, and ends.\n\n\
                  Left alone are loopback, the proxy's own connections, the admin port, the ports to skip, and everything that is not \
                  TCP: UDP never passes the proxy. Needs the capabilities NET_ADMIN and NET_RAW. Running it again gives the same rules."
)]
struct RawConfig {
    /// Port where the proxy takes what reaches the pod (required)
    #[arg(long, value_name = "PORT")]
    inbound_port: Option<String>,
    /// Port where the proxy takes what leaves the pod (required)
    #[arg(long, value_name = "PORT")]
    outbound_port: Option<String>,
    /// Port of the proxy that is reached as it is, for probes (required)
    #[arg(long, value_name = "PORT")]
    admin_port: Option<String>,
    /// User that the proxy runs as: its connections go out as they are (required)
    #[arg(long, value_name = "UID")]
    proxy_uid: Option<String>,
    /// Ports of this pod that are reached without the proxy, such as 25,9000-9100
    #[arg(
        long,
        value_name = "LIST",
        default_value = "",
        hide_default_value = true,
        allow_hyphen_values = true
    )]
    skip_inbound_ports: String,
    /// Ports of others that are reached without the proxy, such as 3306,9000-9100
    #[arg(
        long,
        value_name = "LIST",
        default_value = "",
        hide_default_value = true,
        allow_hyphen_values = true
    )]
    skip_outbound_ports: String,
    /// Print the rules of both families and change nothing; needs no privileges
    #[arg(long)]
    dry_run: bool,
}

fn required<T: Default>(
    problems: &mut Vec<String>,
    name: &str,
    text: Option<String>,
    parse: impl Fn(&str) -> Result<T, String>,
) -> T {
    let result = text.map_or_else(|| Err("is missing".to_owned()), |text| parse(text.trim()));
    result.unwrap_or_else(|problem| {
        problems.push(format!("{name}: {problem}"));
        T::default()
    })
}

fn list(problems: &mut Vec<String>, name: &str, text: &str) -> Ports {
    Ports::parse(text).unwrap_or_else(|wrong| {
        problems.extend(
            wrong
                .into_iter()
                .map(|problem| format!("{name}: {problem}")),
        );
        Ports::default()
    })
}

/// The highest number is no user: the kernel uses it to say "none".
fn parse_uid(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(uid) if uid < u32::MAX && !text.starts_with('+') => Ok(uid),
        _ => Err(format!("`{text}` is not a user's number")),
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [only] => write!(f, "the configuration has a problem: {only}"),
            all => {
                write!(f, "the configuration has {} problems:", all.len())?;
                all.iter()
                    .try_for_each(|problem| write!(f, "\n  - {problem}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(args: &str) -> Result<Config, String> {
        let args = std::iter::once("proxy-init").chain(args.split_whitespace());
        let raw = RawConfig::try_parse_from(args).expect("flags that exist");
        Config::check(raw, USUAL_PATH.into()).map_err(|problems| problems.to_string())
    }

    #[test]
    fn flags_become_a_configuration() {
        let config = check(
            "--inbound-port 4000 --outbound-port 5000 --admin-port 4001 --proxy-uid 1337 \
             --skip-inbound-ports 25,9000-9100 --skip-outbound-ports=3306",
        );
        assert_eq!(config, Ok(Config::example()));
    }

    #[test]
    fn every_problem_is_in_one_report() {
        let report = check(
            "--inbound-port 0 --outbound-port 4001 --admin-port 4001 --skip-inbound-ports 5,x --skip-outbound-ports -1,9-3",
        );
        assert_eq!(
            report.expect_err("much is wrong"),
            "the configuration has 6 problems:\
             \n  - --inbound-port: `0` is not a port from 1 to 65535\
             \n  - --proxy-uid: is missing\
             \n  - --skip-inbound-ports: `x` is not a port from 1 to 65535\
             \n  - --skip-outbound-ports: `-1` is not a range of ports from 1 to 65535, such as 9000-9100\
             \n  - --skip-outbound-ports: `9-3` ends before it begins\
             \n  - --admin-port: `4001` is the port of --outbound-port too"
        );
    }

    #[test]
    fn the_number_that_means_nobody_is_no_uid() {
        let report =
            check("--inbound-port 1 --outbound-port 2 --admin-port 3 --proxy-uid 4294967295");
        assert_eq!(
            report.expect_err("wrong"),
            "the configuration has a problem: --proxy-uid: `4294967295` is not a user's number"
        );
    }
}
