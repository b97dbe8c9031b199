//! Configuration: flags and environment variables, parsed and validated by clap. The injector passes
//! the ports, because proxy-init needs the same ones: they have no defaults here.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::TypedValueParser;
use clap::builder::styling::Styles;
use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, ValueEnum, value_parser};
use diy_mesh_model::identity::Identity;
use diy_mesh_model::ports::PortSet;
use diy_mesh_model::sidecar::Settings;
use diy_mesh_runtime::LogFormat;
use http::Uri;
use tracing_subscriber::filter::Targets;

use crate::inbound::policy::Policy;
use crate::limits::timeouts::Timeouts;
use crate::observe::dump::{Format, Mode};
use crate::observe::probe::{KubeletProbe, Pod};

/// The largest `--max-connection-age`, in seconds: a year, longer than any certificate is valid.
const MAX_CONNECTION_AGE: u64 = 365 * 24 * 3600;

/// The sidecar proxy of DIY Service Mesh: forwards every TCP connection of its pod.
#[derive(Clone, Debug, Parser)]
#[command(name = "proxy", version, styles = Styles::plain())]
pub struct Config {
    /// Port of inbound connections, to which proxy-init redirects
    #[arg(long, value_name = "PORT", value_parser = value_parser!(u16).range(1..))]
    pub inbound_port: u16,
    /// Port of outbound connections, to which proxy-init redirects
    #[arg(long, value_name = "PORT", value_parser = value_parser!(u16).range(1..))]
    pub outbound_port: u16,
    /// Port of /live, /ready, /metrics and /probes/INDEX, and for the pod itself of /exchanges, /state
    /// and /traffic
    #[arg(long, value_name = "PORT", value_parser = value_parser!(u16).range(1..))]
    pub admin_port: u16,
    /// Parts of requests and responses that the proxy prints on standard output
    #[arg(long, value_name = "MODE", default_value = "headers")]
    pub dump: Mode,
    /// Format of the dumps
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub dump_format: Format,
    /// Inbound connections to accept
    #[arg(long, value_name = "MODE", default_value = "permissive")]
    inbound: InboundMode,
    /// Ignored: injectors before `--kubelet-probe` passed it to the proxies of strict pods
    #[arg(long = "probe", value_name = "PROBE", hide = true)]
    pub exempt_probes: Vec<String>,
    /// Ports of the application whose connections are forwarded without protocol detection, such as
    /// 25,9000-9100
    #[arg(
        long,
        value_name = "LIST",
        default_value = "",
        hide_default_value = true,
        allow_hyphen_values = true
    )]
    opaque_ports: PortSet,
    /// Forward CONNECT requests to the application
    #[arg(long)]
    allow_connect: bool,
    /// Let rules of AuthorizationPolicies about paths match plain paths only
    #[arg(long)]
    plain_paths: bool,
    /// Refuse private addresses of names that policies of egress allow, unless a block allows the
    /// address
    #[arg(long)]
    pub refuse_private_names: bool,
    /// Report to the controller neither the callers and the calls of the pod, nor its traffic
    #[arg(long)]
    pub hide_edges: bool,
    /// Be ready while a connection over loopback, one in 10 s, shows that the rules of proxy-init are in force;
    /// requires the proxy-init of the same release
    #[arg(long)]
    pub verify_redirect: bool,
    /// Maximum age of connections between proxies, 1 to 31536000: HTTP connections end gracefully,
    /// others are reset [default: none]
    #[arg(
        long,
        value_name = "SECONDS",
        default_value = "",
        hide_default_value = true,
        allow_hyphen_values = true,
        value_parser = parse_max_connection_age
    )]
    pub max_connection_age: MaxConnectionAge,
    /// Timeouts of connections.
    #[command(flatten)]
    pub timeouts: Timeouts,
    /// Memory of the proxy in MiB, 32 or more, of which connections and their buffers use three
    /// quarters
    /// [default: the limit of the container, or an eighth of the machine's memory]
    #[arg(long, value_name = "MIB", value_parser = memory())]
    pub memory_limit: Option<usize>,
    /// Worker threads, 1 to 64
    #[arg(long, value_name = "N", default_value = "1", value_parser = workers())]
    pub workers: usize,
    /// File with the name servers of the pod, which resolve the names that policies of egress allow;
    /// read once
    #[arg(long, value_name = "FILE", default_value = "/etc/resolv.conf")]
    pub resolv_conf: PathBuf,
    /// Time for open connections to finish after SIGTERM, 1 to 3600
    #[arg(long = "drain-seconds", value_name = "SECONDS", default_value = "20", value_parser = drain())]
    pub drain: Duration,
    /// URL of the controller: `https://HOST:PORT`. With http:// the proxy has no identity and uses
    /// no mutual TLS
    #[arg(long, env = "SERVICE_MESH_CONTROLLER", value_name = "URL", value_parser = parse_controller)]
    pub controller: Uri,
    /// SPIFFE ID of the controller's certificate, with the trust domain of the proxy [required with
    /// https://]
    #[arg(long, env = "SERVICE_MESH_CONTROLLER_IDENTITY", value_name = "ID")]
    controller_identity: Option<Identity>,
    /// PEM file with the trust roots, read again for each connection to the controller [required
    /// with https://]
    #[arg(long, env = "SERVICE_MESH_ROOTS_FILE", value_name = "FILE")]
    roots_file: Option<PathBuf>,
    /// File with the service account token that authenticates this workload to the controller, read
    /// again for each connection
    #[arg(long, env = "SERVICE_MESH_TOKEN_FILE", value_name = "FILE")]
    pub token_file: PathBuf,
    /// Probe or lifecycle hook that the proxy performs for the kubelet, in JSON with the fields of
    /// Kubernetes; may be repeated. The first one is /probes/0 of the admin port
    #[arg(long = "kubelet-probe", value_name = "JSON", requires = "pod_ip")]
    kubelet_probes: Vec<KubeletProbe>,
    /// Address of this pod, for probes
    #[arg(long, env = "POD_IP", value_name = "ADDRESS")]
    pod_ip: Option<IpAddr>,
    /// Name of this pod, for logs
    #[arg(long, env = "POD_NAME", value_name = "NAME", default_value = "")]
    pub pod_name: String,
    /// Namespace of this pod, for logs
    #[arg(
        long,
        env = "POD_NAMESPACE",
        value_name = "NAMESPACE",
        default_value = ""
    )]
    pub pod_namespace: String,
    /// Filter of the log on standard error, for example info or diy_mesh_proxy=debug
    #[arg(long, env = "LOG", value_name = "FILTER", default_value = "info")]
    pub log: Targets,
    /// Format of the log
    #[arg(
        long,
        env = "LOG_FORMAT",
        value_name = "FORMAT",
        default_value = "text"
    )]
    pub log_format: LogFormat,
    /// Which inbound connections and requests are authorized, until the controller says so.
    #[arg(skip)]
    pub policy: Policy,
    /// How the controller is authenticated. `None` over plaintext: the proxy has no identity.
    #[arg(skip)]
    pub controller_proof: Option<ControllerProof>,
}

/// Which inbound connections the proxy accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum InboundMode {
    /// All connections
    Permissive,
    /// Mutual TLS connections from workloads of the mesh
    Strict,
}

/// A maximum age in seconds; `None` if the flag is empty. An alias, because clap gives `Option`
/// itself another meaning.
type MaxConnectionAge = Option<Duration>;

/// The means to authenticate the controller.
#[derive(Debug, Clone)]
pub struct ControllerProof {
    /// Identity of the controller. Its trust domain is the proxy's own.
    pub identity: Identity,
    /// PEM file with the trusted root certificates.
    pub roots_file: PathBuf,
}

impl Config {
    /// Reads flags and environment. Exits the process on `--help`, `--version` and invalid values
    /// (code 2).
    pub fn load() -> Self {
        Self::read(std::env::args_os()).unwrap_or_else(|error| error.exit())
    }

    /// Reads arguments, among which settings of the injector stand for flags.
    fn read(arguments: impl Iterator<Item = OsString>) -> Result<Self, clap::Error> {
        let arguments = Settings::expand(arguments).map_err(|error| {
            let report = format!("invalid settings in --settings: {error}");
            Self::command().error(ErrorKind::ValueValidation, report)
        })?;
        let mut config = Self::try_parse_from(arguments)?.check()?;
        config.policy.pending = true;
        Ok(config)
    }

    /// Checks values against each other: ports differ, and a controller over TLS has an identity
    /// and roots.
    pub fn check(mut self) -> Result<Self, clap::Error> {
        let ports = self.ports();
        if ports[0] == ports[1] || ports[0] == ports[2] || ports[1] == ports[2] {
            return Err(Self::command().error(
                ErrorKind::ValueValidation,
                format!("--inbound-port, --outbound-port and --admin-port must differ: {ports:?}"),
            ));
        }
        if self.controller.scheme_str() == Some("https") {
            let identity = self.controller_identity.clone();
            self.controller_proof = Some(ControllerProof {
                identity: required(identity, "--controller-identity <ID>")?,
                roots_file: required(self.roots_file.clone(), "--roots-file <FILE>")?,
            });
        }
        self.policy = Policy {
            strict: self.inbound == InboundMode::Strict,
            opaque_ports: self.opaque_ports.clone(),
            allow_connect: self.allow_connect,
            plain_paths: self.plain_paths,
            ..Policy::default()
        };
        Ok(self)
    }

    /// The ports of the proxy.
    fn ports(&self) -> [u16; 3] {
        [self.inbound_port, self.outbound_port, self.admin_port]
    }

    /// The probes that the proxy performs for the kubelet, and their target.
    pub fn kubelet_probes(&self) -> Option<(Pod, &[KubeletProbe])> {
        let proxy_ports = self.ports();
        let pod = self.pod_ip.map(|ip| Pod { ip, proxy_ports });
        pod.map(|pod| (pod, self.kubelet_probes.as_slice()))
    }

    /// Namespace and name of this pod: "namespace/name".
    pub fn pod(&self) -> String {
        format!("{}/{}", self.pod_namespace, self.pod_name)
    }
}

/// The value of a flag that is required with a controller over TLS.
fn required<T>(value: Option<T>, flag: &str) -> Result<T, clap::Error> {
    value.ok_or_else(|| {
        Config::command().error(
            ErrorKind::MissingRequiredArgument,
            format!("a controller over https:// requires {flag}"),
        )
    })
}

fn memory() -> impl TypedValueParser<Value = usize> {
    let mebibytes = value_parser!(u32).range(32..=1_048_576);
    mebibytes.map(|mebibytes| mebibytes as usize * 1024 * 1024)
}

fn workers() -> impl TypedValueParser<Value = usize> {
    value_parser!(u8).range(1..=64).map(usize::from)
}

fn drain() -> impl TypedValueParser<Value = Duration> {
    value_parser!(u64).range(1..=3600).map(Duration::from_secs)
}

fn parse_controller(url: &str) -> Result<Uri, &'static str> {
    url.parse()
        .ok()
        .filter(|uri: &Uri| {
            matches!(uri.scheme_str(), Some("http" | "https"))
                && uri.port_u16().is_some()
                && uri.host().is_some_and(|host| !host.is_empty())
        })
        .ok_or("expected https://HOST:PORT, such as https://controller.service-mesh.svc.cluster.local.:8080")
}

fn parse_max_connection_age(text: &str) -> Result<MaxConnectionAge, String> {
    match text.trim() {
        "" => Ok(None),
        text => text
            .parse()
            .ok()
            .filter(|seconds| (1..=MAX_CONNECTION_AGE).contains(seconds))
            .map(|seconds| Some(Duration::from_secs(seconds)))
            .ok_or_else(|| format!("expected seconds, 1 to {MAX_CONNECTION_AGE}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(args: &[&str]) -> Result<Config, String> {
        let args = [&["proxy"], args].concat().into_iter();
        Config::read(args.map(OsString::from)).map_err(|error| error.to_string())
    }

    const VALID: [&str; 7] = [
        "--inbound-port=4000",
        "--outbound-port=5000",
        "--admin-port=4001",
        "--controller=https://controller:8080",
        "--controller-identity=spiffe://cluster.local/ns/service-mesh/sa/controller",
        "--roots-file=/roots",
        "--token-file=/token",
    ];

    /// The valid flags without `--{name}`, and with `more`.
    fn with(name: &str, more: &[&'static str]) -> Result<Config, String> {
        let flag = format!("--{name}=");
        let kept = VALID.into_iter().filter(|arg| !arg.starts_with(&flag));
        config(&kept.chain(more.iter().copied()).collect::<Vec<_>>())
    }

    #[test]
    fn accepts_the_flags_that_the_injector_passes() {
        let config = config(&VALID).unwrap();
        assert_eq!(
            (
                config.inbound_port,
                config.outbound_port,
                config.admin_port,
                config.workers,
                config.drain
            ),
            (4000, 5000, 4001, 1, Duration::from_secs(20))
        );
        assert_eq!(config.dump, Mode::Headers);
        let proof = config.controller_proof.unwrap();
        assert_eq!(
            (proof.identity.namespace(), proof.roots_file),
            ("service-mesh", PathBuf::from("/roots"))
        );
    }

    #[test]
    fn settings_of_the_injector_stand_for_the_flags_of_earlier_ones() {
        let settings = r#"--settings={"strict":true,"opaquePorts":"25","allowConnect":true,"maxConnectionAge":60,"dump":"off","log":"warn","logFormat":"json","drain":7,"later":{}}"#;
        let flags = "--inbound=strict --opaque-ports=25 --allow-connect --max-connection-age=60 \
                     --dump=off --log=warn --log-format=json --drain-seconds=7";
        let flags: Vec<&str> = flags.split(' ').collect();
        let [now, earlier] = [&[settings][..], &flags].map(|more| {
            let config = config(&[&VALID, more].concat()).unwrap();
            format!("{config:?}")
        });
        assert_eq!(now, earlier);
        assert!(now.contains("strict: true"), "{now}");
        for (twice, expected) in [
            (&[settings, "--inbound=permissive"], "--inbound"),
            (&[settings, settings], "--inbound"),
            (&[settings, "--settings={\"strict\":\"no\"}"], "--settings"),
        ] {
            let report = config(&[&VALID[..], twice].concat()).unwrap_err();
            assert!(report.contains(expected), "{report}");
        }
    }

    #[test]
    fn reports_all_missing_flags() {
        let report = config(&["--controller=http://controller:8080"]).unwrap_err();
        for flag in [
            "--inbound-port",
            "--outbound-port",
            "--admin-port",
            "--token-file",
        ] {
            assert!(report.contains(flag), "{flag} is not in:\n{report}");
        }
    }

    #[test]
    fn rejects_invalid_values_and_names_the_flag() {
        for (name, value, expected) in [
            ("inbound-port", "--inbound-port=x", "invalid digit"),
            ("inbound-port", "--inbound-port=0", "1..=65535"),
            ("dump", "--dump=loud", "full, headers, off"),
            ("dump-format", "--dump-format=xml", "text, json"),
            ("inbound", "--inbound=lax", "permissive, strict"),
            ("kubelet-probe", "--kubelet-probe=tcp:80", "a probe in JSON"),
            ("pod-ip", "--pod-ip=localhost", "invalid IP address"),
            (
                "opaque-ports",
                "--opaque-ports=25,smtp",
                "\"smtp\" is neither",
            ),
            (
                "max-connection-age",
                "--max-connection-age=0",
                "1 to 31536000",
            ),
            ("workers", "--workers=0", "1..=64"),
            (
                "http1-idle-timeout",
                "--http1-idle-timeout=0",
                "1..=31536000",
            ),
            ("memory-limit", "--memory-limit=16", "32..=1048576"),
            ("detect-timeout", "--detect-timeout=5s", "invalid digit"),
            (
                "tcp-user-timeout",
                "--tcp-user-timeout=9999999",
                "0..=2147483",
            ),
            ("drain-seconds", "--drain-seconds=3601", "1..=3600"),
            (
                "controller",
                "--controller=controller",
                "expected https://HOST:PORT",
            ),
            (
                "controller-identity",
                "--controller-identity=spiffe://cluster.local/controller",
                "spiffe://",
            ),
            ("log", "--log=a=b=c", "a=b=c"),
            ("log-format", "--log-format=xml", "text, json"),
        ] {
            let report = with(name, &[value]).unwrap_err();
            assert!(
                report.contains(expected) && report.contains(&format!("'--{name} <")),
                "{value}: {report}"
            );
        }
    }

    #[test]
    fn rejects_urls_without_scheme_host_or_port() {
        assert!(parse_controller("http://[fd00::1]:8080").is_ok());
        for wrong in [
            "",
            "controller:8080",
            "ftp://controller:8080",
            "http://",
            "http://:8080",
            "http://controller",
            "http://a b:80",
        ] {
            let error = parse_controller(wrong).expect_err(wrong);
            assert!(error.contains("expected https://HOST:PORT"), "{wrong}");
        }
    }

    #[test]
    fn requires_identity_and_roots_of_a_controller_over_tls_only() {
        for name in ["controller-identity", "roots-file"] {
            let report = with(name, &[]).unwrap_err();
            assert!(report.contains(&format!("requires --{name}")), "{report}");
        }
        let plaintext = with("controller", &["--controller=http://controller:8080"]).unwrap();
        assert!(plaintext.controller_proof.is_none());
    }

    #[test]
    fn absent_and_empty_settings_are_off() {
        let given = |args: &[&'static str]| with("none", args).unwrap();
        let pending = Policy {
            pending: true,
            ..Policy::default()
        };
        for config in [
            given(&[]),
            given(&["--opaque-ports=", "--max-connection-age="]),
        ] {
            assert_eq!(
                (config.policy, config.max_connection_age),
                (pending.clone(), None)
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
    fn reads_probes_in_order() {
        let first = r#"--kubelet-probe={"tcpSocket":{"port":80},"timeoutSeconds":1}"#;
        let second = r#"--kubelet-probe={"grpc":{"port":81},"timeoutSeconds":1}"#;
        let config = with("none", &[first, second, "--pod-ip=10.0.0.7"]).unwrap();
        let (pod, probes) = config.kubelet_probes().unwrap();
        assert_eq!(
            (pod.ip.to_string(), pod.proxy_ports),
            ("10.0.0.7".into(), [4000, 5000, 4001])
        );
        let ports = [80, 81].map(|port| format!("port {port}"));
        assert!(
            probes.len() == 2
                && std::iter::zip(probes, ports)
                    .all(|(probe, port)| probe.to_string().ends_with(&port))
        );
        let earlier = with("none", &["--probe=tcp:80"]).unwrap();
        assert!(!earlier.exempt_probes.is_empty());
        let report = with("none", &[first]).unwrap_err();
        assert!(report.contains("--pod-ip <ADDRESS>"), "{report}");
    }

    #[test]
    fn rejects_equal_ports() {
        let report = with("outbound-port", &["--outbound-port=4000"]).unwrap_err();
        assert!(
            report.contains("must differ: [4000, 4000, 4001]"),
            "{report}"
        );
    }
}
