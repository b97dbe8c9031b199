//! Flags and environment of the sample programs: read as text first, then checked, with every problem in one report.
//!
//! Nothing else in this crate looks at the environment.

use std::ffi::OsString;

use clap::{CommandFactory, FromArgMatches, Parser};
use hyper::Uri;

/// What both servers are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// The port to listen on; 0 takes a free one.
    pub listen_port: u16,
    /// How many of a hundred requests fail on purpose.
    pub fail_rate: u8,
    /// The name that the answers give.
    pub hostname: String,
    /// The version that the answers give.
    pub version: String,
}

/// What both clients are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientConfig {
    /// Where the calls go: an `http://` URL.
    pub endpoint: Uri,
}

/// A program's name and what it is, as `--help` says it.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// The name of the binary.
    pub name: &'static str,
    /// One line for `--help`.
    pub about: &'static str,
}

/// Everything that is wrong with a configuration.
#[derive(Debug, PartialEq, Eq)]
pub struct Problems(Vec<String>);

impl ServerConfig {
    /// Reads flags and environment. Ends the process for `--help`, `--version` and unknown flags.
    pub fn read(program: Program) -> Result<Self, Problems> {
        Self::check(parse(program, std::env::args_os()))
    }

    fn check(raw: RawServer) -> Result<Self, Problems> {
        let mut problems = Vec::new();
        let mut number =
            |variable: &str, text: Option<String>, default: u16, max: u16| match given(text) {
                None => default,
                Some(text) => match text.parse::<u16>() {
                    Ok(number) if number <= max => number,
                    _ => {
                        problems.push(format!(
                            "{variable}: `{text}` is not a whole number from 0 to {max}"
                        ));
                        default
                    }
                },
            };
        let listen_port = number("LISTEN_PORT", raw.listen_port, 8080, u16::MAX);
        let fail_rate = number("FAIL_RATE", raw.fail_rate, 0, 100);
        if !problems.is_empty() {
            return Err(Problems(problems));
        }
        Ok(Self {
            listen_port,
            fail_rate: u8::try_from(fail_rate).expect("at most 100, checked above"),
            hostname: given(raw.hostname).unwrap_or_else(own_hostname),
            version: given(raw.app_version).unwrap_or_else(|| env!("CARGO_PKG_VERSION").to_owned()),
        })
    }
}

impl ClientConfig {
    /// Reads flags and environment. Ends the process for `--help`, `--version` and unknown flags.
    pub fn read(program: Program, default_endpoint: &'static str) -> Result<Self, Problems> {
        Self::check(parse(program, std::env::args_os()), default_endpoint)
    }

    fn check(raw: RawClient, default_endpoint: &str) -> Result<Self, Problems> {
        let text = given(raw.endpoint).unwrap_or_else(|| default_endpoint.to_owned());
        let mut problems = Vec::new();
        match text.parse::<Uri>() {
            Err(error) => problems.push(format!("ENDPOINT: `{text}` is not a URL: {error}")),
            Ok(endpoint) => {
                if endpoint.scheme_str() != Some("http") {
                    problems.push(format!("ENDPOINT: `{text}` does not begin with http://, which is all that this program speaks"));
                }
                if endpoint.host().is_none_or(str::is_empty) {
                    problems.push(format!("ENDPOINT: `{text}` names no host"));
                }
                if let Some(authority) = endpoint.authority() {
                    let plain = authority.as_str().len() == authority.host().len();
                    if authority.as_str().contains('@') {
                        problems.push(format!(
                            "ENDPOINT: `{text}` has a user name, which is not supported"
                        ));
                    } else if !plain && authority.port_u16().is_none_or(|port| port == 0) {
                        problems.push(format!(
                            "ENDPOINT: `{text}` has no port from 1 to 65535 after its colon"
                        ));
                    }
                }
                if problems.is_empty() {
                    return Ok(Self { endpoint });
                }
            }
        }
        Err(Problems(problems))
    }
}

impl std::fmt::Display for Problems {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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

/// A server's settings as they came: text, none of it checked.
#[derive(Debug, Default, Parser)]
struct RawServer {
    /// Port to listen on, IPv4 and IPv6; 0 takes a free one [default: 8080]
    #[arg(long, env = "LISTEN_PORT", value_name = "PORT")]
    listen_port: Option<String>,
    /// Percentage of the requests that fail on purpose, 0 to 100 [default: 0]
    #[arg(long, env = "FAIL_RATE", value_name = "PERCENT")]
    fail_rate: Option<String>,
    /// Name that the answers give [default: this machine's]
    #[arg(long, env = "HOSTNAME", value_name = "NAME")]
    hostname: Option<String>,
    /// Version that the answers give [default: this program's]
    #[arg(long, env = "VERSION", value_name = "VERSION")]
    app_version: Option<String>,
}

/// A client's settings as they came: text, none of it checked.
#[derive(Debug, Default, Parser)]
struct RawClient {
    /// URL to call, http:// only
    #[arg(long, env = "ENDPOINT", value_name = "URL")]
    endpoint: Option<String>,
}

fn parse<T: CommandFactory + FromArgMatches>(
    program: Program,
    args: impl IntoIterator<Item = OsString>,
) -> T {
    let command = T::command()
        .name(program.name)
        .bin_name(program.name)
        .about(program.about)
        .version(env!("CARGO_PKG_VERSION"));
    let matches = command.get_matches_from(args);
    T::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

/// An empty variable counts as one that is not there: manifests often set them so.
fn given(text: Option<String>) -> Option<String> {
    text.map(|text| text.trim().to_owned())
        .filter(|text| !text.is_empty())
}

fn own_hostname() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    given(Some(name)).unwrap_or_else(|| "unknown".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(listen_port: &str, fail_rate: &str) -> RawServer {
        RawServer {
            listen_port: Some(listen_port.to_owned()),
            fail_rate: Some(fail_rate.to_owned()),
            hostname: Some("h".to_owned()),
            app_version: Some("2.0".to_owned()),
        }
    }

    #[test]
    fn empty_variables_mean_the_defaults() {
        let config = ServerConfig::check(raw("", " ")).expect("valid");
        assert_eq!((config.listen_port, config.fail_rate), (8080, 0));
    }

    #[test]
    fn the_whole_range_is_accepted() {
        let config = ServerConfig::check(raw("65535", "100")).expect("valid");
        let expected = ServerConfig {
            listen_port: 65535,
            fail_rate: 100,
            hostname: "h".to_owned(),
            version: "2.0".to_owned(),
        };
        assert_eq!(config, expected);
    }

    #[test]
    fn every_problem_is_in_one_report() {
        let report = ServerConfig::check(raw("65536", "101"))
            .expect_err("both are wrong")
            .to_string();
        assert_eq!(
            report,
            "the configuration has 2 problems:\
             \n  - LISTEN_PORT: `65536` is not a whole number from 0 to 65535\
             \n  - FAIL_RATE: `101` is not a whole number from 0 to 100"
        );
    }

    #[test]
    fn a_hostname_is_found_where_none_is_given() {
        let config = ServerConfig::check(RawServer::default()).expect("valid");
        assert!(!config.hostname.is_empty());
        assert_eq!(config.version, env!("CARGO_PKG_VERSION"));
    }

    #[test]
    fn a_name_with_a_trailing_dot_is_kept() {
        let config =
            ClientConfig::check(RawClient::default(), "http://a.b.svc.cluster.local./hello")
                .expect("valid");
        assert_eq!(
            config.endpoint.authority().expect("has one").as_str(),
            "a.b.svc.cluster.local."
        );
    }

    #[test]
    fn endpoints_that_cannot_be_called_are_refused() {
        for bad in [
            "https://host/",
            "/hello",
            "host:80",
            "http://",
            "http://a b/",
            "http://me@host/",
            "http://host:99999/",
        ] {
            let raw = RawClient {
                endpoint: Some(bad.to_owned()),
            };
            let report = ClientConfig::check(raw, "http://unused/")
                .expect_err(bad)
                .to_string();
            assert!(report.contains(&format!("ENDPOINT: `{bad}`")), "{report}");
        }
    }
}
