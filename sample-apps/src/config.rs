//! Flags and environment variables of the sample programs. The only file of this crate that reads
//! the environment.

use std::time::Duration;

use clap::builder::Resettable;
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches, Parser, value_parser};
use hyper::Uri;
use tokio::time::{Interval, MissedTickBehavior, interval};

/// Limit of the delay of a server's responses.
pub const MAX_DELAY_MS: u64 = 60_000;

/// Configuration of both servers.
#[derive(Debug, Clone, PartialEq, Eq, Parser)]
pub struct ServerConfig {
    /// Port to listen on, IPv4 and IPv6; 0 selects a free port
    #[arg(long, env = "LISTEN_PORT", value_name = "PORT", default_value_t = 8080)]
    pub listen_port: u16,
    /// Percentage of requests that fail intentionally
    #[arg(long, env = "FAIL_RATE", value_name = "PERCENT", default_value_t = 0, value_parser = value_parser!(u8).range(..=100))]
    pub fail_rate: u8,
    /// Milliseconds before each response, up to 60000; with http-server, `POST /delay` changes it, with
    /// the milliseconds as body
    #[arg(long, env = "DELAY_MS", value_name = "MS", default_value_t = 0, value_parser = value_parser!(u64).range(..=MAX_DELAY_MS))]
    pub delay_ms: u64,
    /// Hostname in responses [default: the hostname of the machine]
    #[arg(long, env = "HOSTNAME", value_name = "NAME", default_value_t = system_hostname(), hide_default_value = true)]
    pub hostname: String,
    /// Version in responses
    #[arg(id = "app_version", long = "app-version", env = "VERSION", value_name = "VERSION", default_value = env!("CARGO_PKG_VERSION"))]
    pub version: String,
}

/// Configuration of both clients.
#[derive(Debug, Clone, PartialEq, Eq, Parser)]
pub struct ClientConfig {
    /// URL to request, http:// only
    #[arg(long, env = "ENDPOINT", value_name = "URL", value_parser = parse_endpoint)]
    pub endpoint: Uri,
    /// Milliseconds between two requests
    #[arg(long, env = "INTERVAL_MS", value_name = "MS", default_value_t = 1000, value_parser = value_parser!(u64).range(1..))]
    pub interval_ms: u64,
}

impl ClientConfig {
    /// The time between two requests. Requests that are late are skipped.
    pub fn interval(&self) -> Interval {
        let mut ticks = interval(Duration::from_millis(self.interval_ms));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        ticks
    }
}

impl ServerConfig {
    /// Reads flags and environment. Exits the process on `--help`, `--version` and invalid values
    /// (code 2).
    pub fn read(name: &'static str, about: &'static str) -> Self {
        let matches = command::<Self>(name, about).get_matches();
        from_matches(&matches)
    }
}

impl ClientConfig {
    /// Like [`ServerConfig::read`]; `default_endpoint` applies if no URL is given.
    pub fn read(name: &'static str, about: &'static str, default_endpoint: &'static str) -> Self {
        let command = command::<Self>(name, about).mut_arg("endpoint", |arg| {
            arg.default_value(default_endpoint).required(false)
        });
        from_matches(&command.get_matches())
    }
}

fn command<T: CommandFactory>(name: &'static str, about: &'static str) -> Command {
    T::command()
        .name(name)
        .bin_name(name)
        .about(about)
        .version(env!("CARGO_PKG_VERSION"))
        // An empty variable means the default: manifests set optional variables to "".
        .mut_args(|arg| match arg.get_env().and_then(std::env::var_os) {
            Some(value) if value.as_encoded_bytes().trim_ascii().is_empty() => {
                arg.env(Resettable::Reset)
            }
            _ => arg,
        })
}

fn from_matches<T: FromArgMatches>(matches: &ArgMatches) -> T {
    T::from_arg_matches(matches).unwrap_or_else(|error| error.exit())
}

fn parse_endpoint(text: &str) -> Result<Uri, String> {
    let endpoint: Uri = text
        .parse()
        .map_err(|error| format!("not a URL: {error}"))?;
    if endpoint.scheme_str() != Some("http") {
        return Err("expected http://".to_owned());
    }
    let authority = endpoint.authority().ok_or("expected a host")?;
    let has_port = authority.as_str().len() > authority.host().len();
    if authority.host().is_empty() {
        Err("expected a host".to_owned())
    } else if authority.as_str().contains('@') {
        Err("user information is not supported".to_owned())
    } else if has_port && authority.port_u16().is_none_or(|port| port == 0) {
        Err("expected a port from 1 to 65535".to_owned())
    } else {
        Ok(endpoint)
    }
}

fn system_hostname() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "unknown".to_owned(),
        name => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(args: &[&str]) -> Result<ServerConfig, String> {
        let args = [&["http-server"], args].concat();
        ServerConfig::try_parse_from(args).map_err(|error| error.to_string())
    }

    #[test]
    fn accepts_the_whole_range() {
        let config = server(&[
            "--listen-port=65535",
            "--fail-rate=100",
            "--delay-ms=60000",
            "--hostname=h",
            "--app-version=2.0",
        ]);
        let expected = ServerConfig {
            listen_port: 65535,
            fail_rate: 100,
            delay_ms: 60_000,
            hostname: "h".to_owned(),
            version: "2.0".to_owned(),
        };
        assert_eq!(config, Ok(expected));
    }

    #[test]
    fn rejects_numbers_out_of_range() {
        for (arg, expected) in [
            ("--listen-port=65536", "'65536' for '--listen-port"),
            ("--fail-rate=101", "'101' for '--fail-rate"),
            ("--delay-ms=60001", "'60001' for '--delay-ms"),
        ] {
            let report = server(&[arg]).expect_err(arg);
            assert!(report.contains(expected), "{report}");
        }
    }

    #[test]
    fn system_hostname_is_not_empty() {
        assert!(!system_hostname().is_empty());
    }

    #[test]
    fn endpoint_keeps_trailing_dot_of_host() {
        let endpoint = parse_endpoint("http://a.b.svc.cluster.local./hello").expect("valid");
        assert_eq!(
            endpoint.authority().expect("has one"),
            "a.b.svc.cluster.local."
        );
    }

    #[test]
    fn rejects_invalid_endpoints() {
        for invalid in [
            "https://host/",
            "/hello",
            "host:80",
            "http://",
            "http://a b/",
            "http://me@host/",
            "http://host:99999/",
        ] {
            parse_endpoint(invalid).expect_err(invalid);
        }
    }
}
