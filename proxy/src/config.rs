//! How the proxy is started: flags and environment to [`Config`], once, all problems in one report. The injector passes
//! the ports, for proxy-init must be told the same: there are no defaults for them here.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use clap::builder::styling::Styles;
use diy_mesh_proto::Identity;
use tracing_subscriber::filter::Targets;

use crate::dump::{Format, Mode};
use crate::policy::Policy;

/// The largest `--max-connection-age`, in seconds: a year, which is longer than any certificate is valid.
const MAX_CONNECTION_AGE: u64 = 365 * 24 * 3600;

/// The sidecar proxy of DIY Service Mesh: carries every TCP connection of its pod.
#[derive(Debug, Parser)]
#[command(name = "proxy", version, styles = Styles::plain())]
pub struct RawConfig {
    /// Port for connections to the app, redirected by proxy-init [required]
    #[arg(long, value_name = "PORT")]
    inbound_port: Option<String>,
    /// Port for connections of the app, redirected by proxy-init [required]
    #[arg(long, value_name = "PORT")]
    outbound_port: Option<String>,
    /// Port of /live, /ready and /metrics [required]
    #[arg(long, value_name = "PORT")]
    admin_port: Option<String>,
    /// What of the exchanges that go by is printed: full, headers or off
    #[arg(long, value_name = "MODE", default_value = "full")]
    dump: String,
    /// How it is printed: text or json
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    dump_format: String,
    /// Whom the app takes calls from: `permissive`, everybody, or `strict`, who proves by mutual TLS to be in the mesh
    #[arg(long, value_name = "MODE", default_value = "permissive")]
    inbound: String,
    /// A kubelet's probe, which `strict` lets in: `http:PORT:PATH`, `tcp:PORT` or `grpc:PORT`; may be repeated
    #[arg(long, value_name = "PROBE")]
    probe: Vec<String>,
    /// Ports of the app whose connections are carried without detection, such as 25,9000-9100
    #[arg(
        long,
        value_name = "LIST",
        default_value = "",
        hide_default_value = true,
        allow_hyphen_values = true
    )]
    opaque_ports: String,
    /// Let CONNECT requests through to the app
    #[arg(long)]
    allow_connect: bool,
    /// Age at which connections between proxies end: HTTP gracefully, others by a reset [default: none]
    #[arg(
        long,
        value_name = "SECONDS",
        default_value = "",
        hide_default_value = true,
        allow_hyphen_values = true
    )]
    max_connection_age: String,
    /// Worker threads, one a core given
    #[arg(long, value_name = "N", default_value = "1")]
    workers: String,
    /// How long connections may finish what they carry after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value = "20")]
    drain_seconds: String,
    /// Where the controller is: `https://HOST:PORT`; with http:// there is no identity and no TLS in the mesh [required]
    #[arg(long, env = "SERVICE_MESH_CONTROLLER", value_name = "URL")]
    controller: Option<String>,
    /// The identity that the controller must prove, a SPIFFE ID [required with https://]
    #[arg(long, env = "SERVICE_MESH_CONTROLLER_IDENTITY", value_name = "ID")]
    controller_identity: Option<String>,
    /// The file with the roots of trust, PEM [required with https://]
    #[arg(long, env = "SERVICE_MESH_ROOTS_FILE", value_name = "FILE")]
    roots_file: Option<PathBuf>,
    /// The file with the token that proves to the controller who asks [required]
    #[arg(long, env = "SERVICE_MESH_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// This pod's name, for logs
    #[arg(long, env = "POD_NAME", value_name = "NAME", default_value = "")]
    pod_name: String,
    /// This pod's namespace, for logs
    #[arg(
        long,
        env = "POD_NAMESPACE",
        value_name = "NAMESPACE",
        default_value = ""
    )]
    pod_namespace: String,
    /// What is logged to standard error, for example info or diy_mesh_proxy=debug
    #[arg(long, env = "LOG", value_name = "FILTER", default_value = "info")]
    log: String,
}

/// A configuration that was found right.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where inbound connections are redirected to.
    pub inbound_port: u16,
    /// Where outbound connections are redirected to.
    pub outbound_port: u16,
    /// Where the admin server listens.
    pub admin_port: u16,
    /// How much is dumped.
    pub dump: Mode,
    /// In which form.
    pub dump_format: Format,
    /// Whom the app takes calls from.
    pub policy: Policy,
    /// Worker threads.
    pub workers: usize,
    /// The longest that draining takes.
    pub drain: Duration,
    /// The age at which connections between proxies end, where there is one: HTTP gracefully, others by a reset.
    pub max_connection_age: Option<Duration>,
    /// The controller's URL.
    pub controller: tonic::transport::Uri,
    /// How the controller proves itself. None where it is asked in the clear: then this proxy has no identity.
    pub controller_proof: Option<ControllerProof>,
    /// Where the token lies.
    pub token_file: PathBuf,
    /// Who this is, "namespace/name".
    pub pod: String,
    /// The log's filter.
    pub log: Targets,
}

/// What the controller is verified by.
#[derive(Debug, Clone)]
pub struct ControllerProof {
    /// Who it must be. Its trust domain is ours.
    pub identity: Identity,
    /// Where the roots of trust lie.
    pub roots_file: PathBuf,
}

impl Config {
    /// Reads flags and environment; ends the process after `--help` and `--version`.
    pub fn load() -> Result<Self, String> {
        Self::from_raw(RawConfig::parse())
    }

    /// All problems at once, one a line.
    pub fn from_raw(raw: RawConfig) -> Result<Self, String> {
        let mut problems = Vec::new();
        let mut port =
            |flag: &str, text: Option<&String>| match text.map(|text| text.parse::<u16>()) {
                Some(Ok(port)) if port > 0 => port,
                Some(_) => problem(
                    &mut problems,
                    format!(
                        "--{flag} {}: expected a port, 1 to 65535",
                        text.map_or("", |text| text)
                    ),
                ),
                None => problem(
                    &mut problems,
                    format!("--{flag}: missing; the injector passes it"),
                ),
            };
        let inbound_port = port("inbound-port", raw.inbound_port.as_ref());
        let outbound_port = port("outbound-port", raw.outbound_port.as_ref());
        let admin_port = port("admin-port", raw.admin_port.as_ref());
        let same = |one: u16, other: u16| one != 0 && one == other;
        if same(inbound_port, outbound_port)
            || same(outbound_port, admin_port)
            || same(inbound_port, admin_port)
        {
            problems
                .push("--inbound-port, --outbound-port and --admin-port must differ".to_owned());
        }
        let dump = match raw.dump.as_str() {
            "headers" => Mode::Headers,
            "off" => Mode::Off,
            "full" => Mode::Full,
            other => {
                problems.push(format!("--dump {other}: expected full, headers or off"));
                Mode::Full
            }
        };
        let dump_format = match raw.dump_format.as_str() {
            "json" => Format::Json,
            "text" => Format::Text,
            other => {
                problems.push(format!("--dump-format {other}: expected text or json"));
                Format::Text
            }
        };
        let mut policy = Policy {
            strict: raw.inbound == "strict",
            allow_connect: raw.allow_connect,
            ..Policy::default()
        };
        if !matches!(raw.inbound.as_str(), "strict" | "permissive") {
            problems.push(format!(
                "--inbound {}: expected strict or permissive",
                raw.inbound
            ));
        }
        for probe in &raw.probe {
            match probe.parse() {
                Ok(probe) => policy.probes.push(probe),
                Err(problem) => problems.push(format!("--probe {problem}")),
            }
        }
        match raw.opaque_ports.parse() {
            Ok(ports) => policy.opaque_ports = ports,
            Err(problem) => problems.push(format!("--opaque-ports {problem}")),
        }
        let mut number = |flag: &str, text: &str, most: u64| match text.parse::<u64>() {
            Ok(number) if (1..=most).contains(&number) => number,
            _ => {
                problems.push(format!("--{flag} {text}: expected a number, 1 to {most}"));
                1
            }
        };
        let workers = number("workers", &raw.workers, 64) as usize;
        let drain = Duration::from_secs(number("drain-seconds", &raw.drain_seconds, 3600));
        let age = raw.max_connection_age.trim();
        let max_connection_age = (!age.is_empty())
            .then(|| Duration::from_secs(number("max-connection-age", age, MAX_CONNECTION_AGE)));
        let controller = parse_controller(raw.controller.as_deref()).unwrap_or_else(|problem| {
            problems.push(problem);
            tonic::transport::Uri::default()
        });
        let controller_proof = match controller.scheme_str() {
            Some("https") => parse_proof(
                raw.controller_identity.as_deref(),
                raw.roots_file,
                &mut problems,
            ),
            _ => None,
        };
        let token_file = raw.token_file.unwrap_or_else(|| {
            problems.push(
                "SERVICE_MESH_TOKEN_FILE: missing; it names the file with this workload's token"
                    .to_owned(),
            );
            PathBuf::new()
        });
        let log = raw.log.parse().unwrap_or_else(|error| {
            problems.push(format!("LOG={}: {error}", raw.log));
            Targets::default()
        });
        if !problems.is_empty() {
            return Err(problems.join("\n"));
        }
        let pod = format!("{}/{}", raw.pod_namespace, raw.pod_name);
        Ok(Self {
            inbound_port,
            outbound_port,
            admin_port,
            dump,
            dump_format,
            policy,
            workers,
            drain,
            max_connection_age,
            controller,
            controller_proof,
            token_file,
            pod,
            log,
        })
    }
}

fn problem(problems: &mut Vec<String>, text: String) -> u16 {
    problems.push(text);
    0
}

fn parse_controller(url: Option<&str>) -> Result<tonic::transport::Uri, String> {
    let url = url.ok_or("SERVICE_MESH_CONTROLLER: missing; for example https://controller.service-mesh.svc.cluster.local.:8080")?;
    let expected = || format!("SERVICE_MESH_CONTROLLER={url}: expected https://HOST:PORT");
    let uri: tonic::transport::Uri = url.parse().map_err(|_| expected())?;
    if matches!(uri.scheme_str(), Some("http" | "https")) && uri.port_u16().is_some() {
        Ok(uri)
    } else {
        Err(expected())
    }
}

fn parse_proof(
    identity: Option<&str>,
    roots_file: Option<PathBuf>,
    problems: &mut Vec<String>,
) -> Option<ControllerProof> {
    let identity = match identity.map(str::parse) {
        Some(Ok(identity)) => Some(identity),
        Some(Err(problem)) => {
            problems.push(format!(
                "SERVICE_MESH_CONTROLLER_IDENTITY={}: {problem}",
                identity.unwrap_or_default()
            ));
            None
        }
        None => {
            let example = "spiffe://cluster.local/ns/service-mesh/sa/controller";
            problems.push(format!(
                "SERVICE_MESH_CONTROLLER_IDENTITY: missing; for example {example}"
            ));
            None
        }
    };
    if roots_file.is_none() {
        problems.push(
            "SERVICE_MESH_ROOTS_FILE: missing; it names the file with the mesh's roots of trust"
                .to_owned(),
        );
    }
    Some(ControllerProof {
        identity: identity?,
        roots_file: roots_file?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(args: &[&str]) -> Result<Config, String> {
        Config::from_raw(RawConfig::try_parse_from([&["proxy"], args].concat()).unwrap())
    }

    const RIGHT: [&str; 14] = [
        "--inbound-port",
        "4000",
        "--outbound-port",
        "5000",
        "--admin-port",
        "4001",
        "--controller",
        "https://controller:8080",
        "--controller-identity",
        "spiffe://cluster.local/ns/service-mesh/sa/controller",
        "--roots-file",
        "/roots",
        "--token-file",
        "/token",
    ];

    #[test]
    fn the_injectors_flags_are_enough() {
        let config = config(&RIGHT).unwrap();
        assert_eq!(
            (
                config.inbound_port,
                config.outbound_port,
                config.admin_port,
                config.workers
            ),
            (4000, 5000, 4001, 1)
        );
        assert_eq!(config.dump, Mode::Full);
        let proof = config.controller_proof.unwrap();
        assert_eq!(
            (proof.identity.namespace(), proof.roots_file),
            ("service-mesh", PathBuf::from("/roots"))
        );
    }

    #[test]
    fn every_problem_is_in_one_report() {
        let report = config(&[
            "--inbound-port",
            "x",
            "--dump",
            "loud",
            "--workers",
            "0",
            "--controller",
            "controller",
            "--log",
            "a=b=c",
        ])
        .unwrap_err();
        for part in [
            "--inbound-port x",
            "--outbound-port: missing",
            "--admin-port: missing",
            "--dump loud",
            "--workers 0",
            "=controller:",
            "TOKEN_FILE: missing",
            "LOG=",
        ] {
            assert!(report.contains(part), "{part} is not in:\n{report}");
        }
        assert!(
            !report.contains("must differ"),
            "ports that are missing are not the same:\n{report}"
        );
    }

    #[test]
    fn a_controller_over_tls_must_prove_itself_and_one_in_the_clear_cannot() {
        let with = |index: usize, value: &'static str| {
            let mut args = RIGHT;
            args[index] = value;
            config(&args)
        };
        assert!(
            with(9, "spiffe://cluster.local/controller")
                .unwrap_err()
                .contains("SERVICE_MESH_CONTROLLER_IDENTITY=spiffe://")
        );
        let report = config(&RIGHT[..8]).unwrap_err();
        for part in ["CONTROLLER_IDENTITY: missing", "ROOTS_FILE: missing"] {
            assert!(report.contains(part), "{part} is not in:\n{report}");
        }
        assert!(
            with(7, "http://controller:8080")
                .unwrap()
                .controller_proof
                .is_none()
        );
    }

    #[test]
    fn settings_that_are_absent_or_empty_are_off() {
        let given = |args: &[&str]| config(&[&RIGHT, args].concat()).unwrap();
        for config in [
            given(&[]),
            given(&["--opaque-ports=", "--max-connection-age="]),
        ] {
            assert_eq!(
                (config.policy, config.max_connection_age),
                (Policy::default(), None)
            );
        }
        let config = given(&[
            "--opaque-ports=25,9000-9100",
            "--allow-connect",
            "--max-connection-age=1800",
        ]);
        assert!(
            config.policy.opaque_ports.contains(9050)
                && !config.policy.opaque_ports.contains(80)
                && config.policy.allow_connect
        );
        assert_eq!(config.max_connection_age, Some(Duration::from_secs(1800)));
    }

    #[test]
    fn wrong_settings_are_named_with_their_values() {
        let report = config(
            &[
                &RIGHT[..],
                &["--opaque-ports=25,smtp", "--max-connection-age=0"],
            ]
            .concat(),
        )
        .unwrap_err();
        assert!(
            report.contains("--opaque-ports \"smtp\": expected a port from 1 to 65535"),
            "{report}"
        );
        assert!(
            report.contains("--max-connection-age 0: expected a number, 1 to 31536000"),
            "{report}"
        );
    }

    #[test]
    fn ports_must_differ() {
        let args: Vec<&str> = RIGHT
            .iter()
            .map(|arg| if *arg == "5000" { "4000" } else { arg })
            .collect();
        assert!(config(&args).unwrap_err().contains("must differ"));
    }
}
