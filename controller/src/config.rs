//! The configuration: flags and environment, read once, all problems in one report.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use diy_mesh_proto::Identity;
use diy_mesh_proto::identity::TRUST_DOMAIN;
use tracing_subscriber::filter::Targets;

use crate::authenticate::Jwks;

/// Shorter ones could not be renewed in time. In seconds.
const MIN_LIFE_SECONDS: u64 = 10;
const MAX_LIFE_SECONDS: u64 = 100 * 365 * 24 * 60 * 60;

/// What the controller is told, as it is written.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "controller",
    version,
    about = "The control plane of DIY Service Mesh: discovery and certificates over gRPC"
)]
pub struct RawConfig {
    /// Where gRPC is served
    #[arg(long, env = "LISTEN", default_value = "[::]:8080")]
    pub listen: String,
    /// Where /live, /ready and /metrics are served (HTTP)
    #[arg(long, env = "ADMIN_LISTEN", default_value = "[::]:8081")]
    pub admin_listen: String,
    /// Where Services, EndpointSlices and Pods come from: `kubernetes`, or `files:FOLDER`
    #[arg(long, env = "CATALOG", default_value = "kubernetes")]
    pub catalog: String,
    /// Who checks callers' tokens: `token-review` (the Kubernetes API), or `jwks:FILE` (public keys)
    #[arg(long, env = "AUTHENTICATOR", default_value = "token-review")]
    pub authenticator: String,
    /// The only issuer (`iss`) whose tokens are accepted, with `jwks:FILE`; without it, any that the keys belong to
    #[arg(long, env = "JWKS_ISSUER")]
    pub jwks_issuer: Option<String>,
    /// Where the certificate authority lies, shared by all replicas: `kubernetes` (a Secret), or `files:FOLDER`
    #[arg(long, env = "CA", default_value = "kubernetes")]
    pub ca: String,
    /// The trust domain of all identities
    #[arg(long, env = "TRUST_DOMAIN", default_value = TRUST_DOMAIN)]
    pub trust_domain: String,
    /// How long workloads' certificates are valid, in seconds
    #[arg(long, env = "CERTIFICATE_LIFE", default_value_t = 24 * 60 * 60)]
    pub certificate_life: u64,
    /// How long a certificate authority that the controller makes is valid, in seconds
    #[arg(long, env = "CA_LIFE", default_value_t = 365 * 24 * 60 * 60)]
    pub ca_life: u64,
    /// The controller's own namespace
    #[arg(long, env = "POD_NAMESPACE", default_value = "service-mesh")]
    pub pod_namespace: String,
    /// What is logged, for example `info` or `info,diy_mesh_controller=debug`
    // kube's watcher logs each error too, at greater length and with less to go by than the catalog does.
    #[arg(long, env = "LOG", default_value = "info,kube_runtime=error")]
    pub log: String,
}

/// What the controller is told, understood.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Where gRPC is served.
    pub listen: SocketAddr,
    /// Where /live, /ready and /metrics are served.
    pub admin_listen: SocketAddr,
    /// Where the catalog comes from.
    pub catalog: Catalog,
    /// Who checks tokens.
    pub authenticator: Authenticator,
    /// Where the certificate authority lies.
    pub ca: Ca,
    /// The trust domain of all identities.
    pub trust_domain: String,
    /// How long workloads' certificates are valid.
    pub certificate_life: Duration,
    /// How long a certificate authority that the controller makes is valid.
    pub ca_life: Duration,
    /// The controller's own namespace.
    pub pod_namespace: String,
    /// What is logged.
    pub log: Targets,
}

/// Where the catalog comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Catalog {
    /// The cluster that the controller runs in, or that KUBECONFIG names.
    Kubernetes,
    /// A folder of manifests.
    Files(PathBuf),
}

/// Where the certificate authority lies.
#[derive(Clone, Debug, PartialEq)]
pub enum Ca {
    /// In a Secret of the controller's own namespace.
    Kubernetes,
    /// In a folder.
    Files(PathBuf),
}

/// Who checks tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Authenticator {
    /// The Kubernetes API server.
    TokenReview,
    /// A file of public keys.
    Jwks {
        /// A JWK set.
        file: PathBuf,
        /// The only issuer that is accepted, where one is named.
        issuer: Option<String>,
    },
}

/// Everything that is wrong with a configuration.
#[derive(Debug, PartialEq)]
pub struct Problems(pub Vec<String>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the configuration is wrong:")?;
        self.0
            .iter()
            .try_for_each(|problem| writeln!(f, "  - {problem}"))
    }
}

impl Config {
    /// Whether anything in it needs the Kubernetes API.
    pub fn needs_kubernetes(&self) -> bool {
        self.catalog == Catalog::Kubernetes
            || self.authenticator == Authenticator::TokenReview
            || self.ca == Ca::Kubernetes
    }
}

impl TryFrom<RawConfig> for Config {
    type Error = Problems;

    fn try_from(raw: RawConfig) -> Result<Config, Problems> {
        let mut problems = Vec::new();
        let listen = keep(&mut problems, address("LISTEN", &raw.listen));
        let admin_listen = keep(&mut problems, address("ADMIN_LISTEN", &raw.admin_listen));
        let catalog = keep(&mut problems, catalog(&raw.catalog));
        let authenticator = keep(
            &mut problems,
            authenticator(&raw.authenticator, raw.jwks_issuer),
        );
        let ca = keep(&mut problems, ca(&raw.ca));
        let certificate_life = keep(
            &mut problems,
            life(
                "CERTIFICATE_LIFE (--certificate-life)",
                raw.certificate_life,
                MIN_LIFE_SECONDS,
            ),
        );
        let ca_life = keep(
            &mut problems,
            life("CA_LIFE (--ca-life)", raw.ca_life, raw.certificate_life),
        );
        if let Err(error) = Identity::new(&raw.trust_domain, "namespace", "name") {
            problems.push(format!(
                "TRUST_DOMAIN (--trust-domain): {:?}: {error}",
                raw.trust_domain
            ));
        }
        if Identity::new(TRUST_DOMAIN, &raw.pod_namespace, "controller").is_err() {
            let namespace = &raw.pod_namespace;
            problems.push(format!("POD_NAMESPACE (--pod-namespace): {namespace:?} is no namespace; it is the controller's own"));
        }
        let log = raw.log.parse().map_err(|error| {
            format!(
                "LOG (--log): {:?} is no filter: {error}; for example `info`",
                raw.log
            )
        });
        let log = keep(&mut problems, log).unwrap_or_default();
        if let (Some(one), Some(other)) = (listen, admin_listen)
            && one == other
            && one.port() != 0
        {
            problems.push(format!(
                "LISTEN and ADMIN_LISTEN are both {one}; they need two ports"
            ));
        }
        let lives = certificate_life.zip(ca_life);
        match (listen, admin_listen, catalog, authenticator, ca, lives) {
            (
                Some(listen),
                Some(admin_listen),
                Some(catalog),
                Some(authenticator),
                Some(ca),
                Some((certificate_life, ca_life)),
            ) if problems.is_empty() => {
                let RawConfig {
                    trust_domain,
                    pod_namespace,
                    ..
                } = raw;
                Ok(Config {
                    listen,
                    admin_listen,
                    catalog,
                    authenticator,
                    ca,
                    trust_domain,
                    certificate_life,
                    ca_life,
                    pod_namespace,
                    log,
                })
            }
            _ => Err(Problems(problems)),
        }
    }
}

fn keep<T>(problems: &mut Vec<String>, result: Result<T, String>) -> Option<T> {
    result.map_err(|problem| problems.push(problem)).ok()
}

fn address(setting: &str, text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        format!("{setting}: {text:?} is not ADDRESS:PORT, for example [::]:8080 or 127.0.0.1:8080")
    })
}

fn catalog(text: &str) -> Result<Catalog, String> {
    match text.split_once(':') {
        None if text == "kubernetes" => Ok(Catalog::Kubernetes),
        Some(("files", folder)) if !folder.is_empty() => match Path::new(folder).metadata() {
            Ok(metadata) if metadata.is_dir() => Ok(Catalog::Files(folder.into())),
            Ok(_) => Err(format!(
                "CATALOG (--catalog): {folder} is not a folder; name the folder that holds the manifests"
            )),
            Err(error) => Err(format!("CATALOG (--catalog): the folder {folder}: {error}")),
        },
        _ => Err(format!(
            "CATALOG (--catalog): {text:?} is neither `kubernetes` nor `files:FOLDER`"
        )),
    }
}

fn ca(text: &str) -> Result<Ca, String> {
    match text.split_once(':') {
        None if text == "kubernetes" => Ok(Ca::Kubernetes),
        Some(("files", folder)) if !folder.is_empty() => match Path::new(folder).metadata() {
            Ok(metadata) if metadata.is_dir() => Ok(Ca::Files(folder.into())),
            Ok(_) => Err(format!(
                "CA (--ca): {folder} is not a folder; name the folder that all replicas share"
            )),
            Err(error) => Err(format!("CA (--ca): the folder {folder}: {error}")),
        },
        _ => Err(format!(
            "CA (--ca): {text:?} is neither `kubernetes` nor `files:FOLDER`"
        )),
    }
}

fn life(setting: &str, seconds: u64, shortest: u64) -> Result<Duration, String> {
    match seconds {
        _ if seconds < shortest => Err(format!(
            "{setting}: {seconds} seconds; it must be {shortest} at least"
        )),
        _ if seconds > MAX_LIFE_SECONDS => Err(format!(
            "{setting}: {seconds} seconds; it must be {MAX_LIFE_SECONDS} (100 years) at most"
        )),
        _ => Ok(Duration::from_secs(seconds)),
    }
}

fn authenticator(text: &str, issuer: Option<String>) -> Result<Authenticator, String> {
    match text.split_once(':') {
        None if text == "token-review" && issuer.is_some() => {
            Err("JWKS_ISSUER (--jwks-issuer) says nothing to `token-review`; leave it out, or use `jwks:FILE`".to_owned())
        }
        None if text == "token-review" => Ok(Authenticator::TokenReview),
        Some(("jwks", file)) if !file.is_empty() => {
            Jwks::open(Path::new(file), None).map_err(|error| format!("AUTHENTICATOR (--authenticator): {error}"))?;
            Ok(Authenticator::Jwks { file: file.into(), issuer })
        }
        _ => Err(format!("AUTHENTICATOR (--authenticator): {text:?} is neither `token-review` nor `jwks:FILE`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Config, Problems> {
        Config::try_from(RawConfig::try_parse_from([&["controller"], args].concat()).unwrap())
    }

    #[test]
    fn the_defaults_are_those_of_a_cluster() {
        let config = parse(&[]).unwrap();
        assert_eq!(config.listen, "[::]:8080".parse().unwrap());
        assert_eq!(config.admin_listen, "[::]:8081".parse().unwrap());
        assert_eq!(
            (&config.catalog, &config.authenticator),
            (&Catalog::Kubernetes, &Authenticator::TokenReview)
        );
        assert_eq!(
            (config.ca.clone(), config.trust_domain.as_str()),
            (Ca::Kubernetes, "cluster.local")
        );
        assert_eq!(
            (config.certificate_life.as_secs(), config.ca_life.as_secs()),
            (86_400, 31_536_000)
        );
        assert!(config.needs_kubernetes());
    }

    #[test]
    fn every_problem_stands_in_one_report() {
        let args = [
            "--listen",
            "8080",
            "--admin-listen",
            "x",
            "--catalog",
            "files:/nowhere/at/all",
            "--authenticator",
            "jwks:/nowhere",
            "--ca",
            "files",
            "--trust-domain",
            "Upper",
            "--certificate-life",
            "9",
            "--ca-life",
            "8",
            "--log",
            "a=b=c",
        ];
        let Problems(problems) = parse(&args).unwrap_err();
        assert_eq!(problems.len(), 9, "{problems:#?}");
        let parts = [
            "LISTEN: \"8080\"",
            "ADMIN_LISTEN: \"x\"",
            "/nowhere/at/all",
            "/nowhere",
            "\"files\"",
            "LIFE",
            "CA_LIFE",
            "Upper",
            "LOG",
        ];
        for (problem, part) in problems.iter().zip(parts) {
            assert!(problem.contains(part), "{problem}");
        }
    }

    #[test]
    fn two_listeners_need_two_ports() {
        let Problems(problems) =
            parse(&["--listen", "127.0.0.1:1", "--admin-listen", "127.0.0.1:1"]).unwrap_err();
        assert_eq!(
            problems,
            ["LISTEN and ADMIN_LISTEN are both 127.0.0.1:1; they need two ports"]
        );
        assert!(parse(&["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]).is_ok());
    }

    #[test]
    fn an_issuer_without_keys_is_a_mistake() {
        assert!(parse(&["--jwks-issuer", "x"]).is_err());
        assert!(parse(&["--authenticator", "jwks"]).is_err());
        assert!(parse(&["--catalog", "files"]).is_err());
    }
}
