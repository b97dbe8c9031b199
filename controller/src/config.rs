//! The configuration: flags and environment variables. No other module reads the environment.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use diy_mesh_model::identity::{Identity, TRUST_DOMAIN};
use diy_mesh_runtime::LogFormat;
use tracing_subscriber::filter::Targets;

use crate::authenticate::Jwks;

/// Shorter certificates cannot be renewed in time.
const MIN_LIFE_SECONDS: u64 = 10;
const MAX_LIFE_SECONDS: u64 = 100 * 365 * 24 * 60 * 60;

/// The configuration of the controller.
#[derive(Clone, Debug, PartialEq, Parser)]
#[command(
    name = "controller",
    version,
    about = "The control plane of DIY Service Mesh: discovery and certificates over gRPC"
)]
pub struct Config {
    /// Address of the gRPC server
    #[arg(long, env, value_name = "ADDRESS:PORT", default_value = "[::]:8080")]
    pub listen: SocketAddr,
    /// Address of /live, /ready and /metrics (HTTP)
    #[arg(long, env, value_name = "ADDRESS:PORT", default_value = "[::]:8081")]
    pub admin_listen: SocketAddr,
    /// Source of Services, EndpointSlices, Pods, Nodes, routes and policies: `kubernetes`, or
    /// `files:FOLDER`
    #[arg(long, env, value_name = "SOURCE", default_value = "kubernetes")]
    pub catalog: Storage,
    /// Verification of tokens: `token-review` (the Kubernetes API), or `jwks:FILE` (public keys)
    #[arg(long, env, value_name = "METHOD", default_value = "token-review")]
    pub authenticator: Authenticator,
    /// The only accepted issuer (`iss`) of tokens, with `jwks:FILE` [default: any]
    #[arg(long, env, value_name = "ISSUER")]
    pub jwks_issuer: Option<String>,
    /// Storage of the certificate authority, shared by all replicas: `kubernetes` (a Secret), or
    /// `files:FOLDER`
    #[arg(long, env, value_name = "STORAGE", default_value = "kubernetes")]
    pub ca: Storage,
    /// Trust domain of all identities
    #[arg(long, env, value_name = "DOMAIN", value_parser = trust_domain, default_value = TRUST_DOMAIN)]
    pub trust_domain: String,
    /// Validity of workload certificates in seconds, 10 or more
    #[arg(long, env, value_name = "SECONDS", value_parser = life, default_value = "86400")]
    pub certificate_life: Duration,
    /// Validity of a certificate authority that the controller generates, in seconds
    #[arg(long, env, value_name = "SECONDS", value_parser = life, default_value = "31536000")]
    pub ca_life: Duration,
    /// Namespace of the controller
    #[arg(long, env, value_name = "NAMESPACE", value_parser = namespace, default_value = "service-mesh")]
    pub pod_namespace: String,
    /// URLs from which keys of issuers in AuthorizationPolicies may be fetched; separated by commas
    #[arg(long, env, value_name = "URL", value_delimiter = ',')]
    pub key_urls: Vec<String>,
    /// The same of hosts that may have private addresses
    #[arg(long, env, value_name = "URL", value_delimiter = ',')]
    pub private_key_urls: Vec<String>,
    /// Certificates of the CAs of these hosts, in PEM
    #[arg(
        long,
        env,
        value_name = "FILE",
        default_value = "/etc/ssl/certs/ca-certificates.crt"
    )]
    pub key_roots_file: PathBuf,
    /// Log filter, for example `info` or `info,diy_mesh_controller=debug`
    // The catalog logs the errors of watches with more context than kube does.
    #[arg(
        long,
        env,
        value_name = "FILTER",
        default_value = "info,kube_runtime=error"
    )]
    pub log: Targets,
    /// Format of the log
    #[arg(
        long,
        env = "LOG_FORMAT",
        value_name = "FORMAT",
        default_value = "text"
    )]
    pub log_format: LogFormat,
}

/// Storage of the catalog, or of the certificate authority.
#[derive(Clone, Debug, PartialEq)]
pub enum Storage {
    /// The cluster of the pod or of KUBECONFIG.
    Kubernetes,
    /// A folder.
    Files(PathBuf),
}

/// Verification of tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Authenticator {
    /// The Kubernetes API server.
    TokenReview,
    /// A file with public keys, as a JWK set.
    Jwks(PathBuf),
}

impl Config {
    /// Parses the command line and the environment. Prints an error and exits if they are invalid.
    pub fn load() -> Config {
        Config::parse().check().unwrap_or_else(|error| error.exit())
    }

    /// Checks values that depend on each other.
    fn check(self) -> Result<Config, clap::Error> {
        let (listen, ca_life) = (self.listen, self.ca_life.as_secs());
        let certificate_life = self.certificate_life.as_secs();
        let conflict = if listen == self.admin_listen && listen.port() != 0 {
            format!("--listen and --admin-listen are both {listen}; set different ports")
        } else if ca_life < certificate_life {
            format!("--ca-life {ca_life} is less than --certificate-life {certificate_life}")
        } else if self.jwks_issuer.is_some() && self.authenticator == Authenticator::TokenReview {
            "--jwks-issuer requires --authenticator jwks:FILE".to_owned()
        } else {
            return Ok(self);
        };
        Err(Config::command().error(ErrorKind::ArgumentConflict, conflict))
    }

    /// Whether the configuration requires the Kubernetes API.
    pub fn needs_kubernetes(&self) -> bool {
        self.catalog == Storage::Kubernetes
            || self.authenticator == Authenticator::TokenReview
            || self.ca == Storage::Kubernetes
    }
}

impl FromStr for Storage {
    type Err = String;

    fn from_str(text: &str) -> Result<Storage, String> {
        match text.split_once(':') {
            None if text == "kubernetes" => Ok(Storage::Kubernetes),
            Some(("files", folder)) if !folder.is_empty() => match Path::new(folder).metadata() {
                Ok(metadata) if metadata.is_dir() => Ok(Storage::Files(folder.into())),
                Ok(_) => Err(format!("{folder} is not a folder")),
                Err(error) => Err(format!("cannot open the folder {folder}: {error}")),
            },
            _ => Err("expected `kubernetes` or `files:FOLDER`".to_owned()),
        }
    }
}

impl FromStr for Authenticator {
    type Err = String;

    fn from_str(text: &str) -> Result<Authenticator, String> {
        match text.split_once(':') {
            None if text == "token-review" => Ok(Authenticator::TokenReview),
            Some(("jwks", file)) if !file.is_empty() => {
                Jwks::open(Path::new(file), None).map_err(|error| error.to_string())?;
                Ok(Authenticator::Jwks(file.into()))
            }
            _ => Err("expected `token-review` or `jwks:FILE`".to_owned()),
        }
    }
}

fn life(text: &str) -> Result<Duration, String> {
    let range = MIN_LIFE_SECONDS..=MAX_LIFE_SECONDS;
    let seconds = text.parse().ok().filter(|seconds| range.contains(seconds));
    seconds.map(Duration::from_secs).ok_or_else(|| {
        format!("expected {MIN_LIFE_SECONDS} to {MAX_LIFE_SECONDS} seconds (100 years)")
    })
}

fn trust_domain(text: &str) -> Result<String, String> {
    Identity::new(text, "namespace", "name")
        .map(|_| text.to_owned())
        .map_err(|error| error.to_string())
}

fn namespace(text: &str) -> Result<String, String> {
    Identity::new(TRUST_DOMAIN, text, "controller")
        .map(|_| text.to_owned())
        .map_err(|_| "expected the name of a namespace".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Config, clap::Error> {
        Config::try_parse_from([&["controller"], args].concat()).and_then(Config::check)
    }

    #[test]
    fn defaults_are_for_a_cluster() {
        let config = parse(&[]).unwrap();
        assert_eq!(config.listen, "[::]:8080".parse().unwrap());
        assert_eq!(config.admin_listen, "[::]:8081".parse().unwrap());
        assert_eq!(
            (&config.catalog, &config.authenticator),
            (&Storage::Kubernetes, &Authenticator::TokenReview)
        );
        assert_eq!(
            (config.ca.clone(), config.trust_domain.as_str()),
            (Storage::Kubernetes, "cluster.local")
        );
        assert_eq!(
            (config.certificate_life.as_secs(), config.ca_life.as_secs()),
            (86_400, 31_536_000)
        );
        assert!(config.needs_kubernetes());
    }

    #[test]
    fn rejects_invalid_values_with_flag_and_value() {
        for [flag, value] in [
            ["--listen", "8080"],
            ["--admin-listen", "x"],
            ["--catalog", "files:/nowhere/at/all"],
            ["--catalog", "files"],
            ["--authenticator", "jwks:/nowhere"],
            ["--authenticator", "jwks"],
            ["--ca", "files"],
            ["--trust-domain", "Upper"],
            ["--certificate-life", "9"],
            ["--ca-life", "9999999999"],
            ["--pod-namespace", "a/b"],
            ["--log", "a=b=c"],
        ] {
            let error = parse(&[flag, value]).unwrap_err();
            let text = error.to_string();
            assert_eq!(error.exit_code(), 2);
            assert!(text.contains(flag) && text.contains(value), "{text}");
        }
    }

    #[test]
    fn rejects_conflicting_values() {
        for (args, part) in [
            (
                &["--listen", "127.0.0.1:1", "--admin-listen", "127.0.0.1:1"],
                "--listen and --admin-listen are both 127.0.0.1:1",
            ),
            (
                &["--ca-life", "100", "--certificate-life", "101"],
                "--ca-life 100 is less than --certificate-life 101",
            ),
            (
                &["--jwks-issuer", "x", "--authenticator", "token-review"],
                "--jwks-issuer requires",
            ),
        ] {
            let text = parse(args).unwrap_err().to_string();
            assert!(text.contains(part), "{text}");
        }
        assert!(parse(&["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]).is_ok());
    }
}
