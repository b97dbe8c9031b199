//! The configuration: flags and environment, read once, all problems in one report.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::authenticate::Jwks;

/// What the controller is told, as it is written.
#[derive(Clone, Debug, Parser)]
#[command(name = "controller", version, about = "The control plane of DIY Service Mesh: discovery over gRPC")]
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
    /// The controller's own namespace.
    pub pod_namespace: String,
    /// What is logged.
    pub log: String,
}

/// Where the catalog comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Catalog {
    /// The cluster that the controller runs in, or that KUBECONFIG names.
    Kubernetes,
    /// A folder of manifests.
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
        self.0.iter().try_for_each(|problem| writeln!(f, "  - {problem}"))
    }
}

impl Config {
    /// Whether anything in it needs the Kubernetes API.
    pub fn needs_kubernetes(&self) -> bool {
        self.catalog == Catalog::Kubernetes || self.authenticator == Authenticator::TokenReview
    }
}

impl TryFrom<RawConfig> for Config {
    type Error = Problems;

    fn try_from(raw: RawConfig) -> Result<Config, Problems> {
        let mut problems = Vec::new();
        let listen = keep(&mut problems, address("LISTEN", &raw.listen));
        let admin_listen = keep(&mut problems, address("ADMIN_LISTEN", &raw.admin_listen));
        let catalog = keep(&mut problems, catalog(&raw.catalog));
        let authenticator = keep(&mut problems, authenticator(&raw.authenticator, raw.jwks_issuer));
        if raw.pod_namespace.is_empty() {
            problems.push("POD_NAMESPACE (--pod-namespace) is empty; it is the namespace that the controller runs in".to_owned());
        }
        if let Err(error) = EnvFilter::try_new(&raw.log) {
            problems.push(format!("LOG (--log): {:?} is no filter: {error}; for example `info`", raw.log));
        }
        if let (Some(one), Some(other)) = (listen, admin_listen)
            && one == other
            && one.port() != 0
        {
            problems.push(format!("LISTEN and ADMIN_LISTEN are both {one}; they need two ports"));
        }
        match (listen, admin_listen, catalog, authenticator) {
            (Some(listen), Some(admin_listen), Some(catalog), Some(authenticator)) if problems.is_empty() => {
                Ok(Config { listen, admin_listen, catalog, authenticator, pod_namespace: raw.pod_namespace, log: raw.log })
            }
            _ => Err(Problems(problems)),
        }
    }
}

fn keep<T>(problems: &mut Vec<String>, result: Result<T, String>) -> Option<T> {
    result.map_err(|problem| problems.push(problem)).ok()
}

fn address(setting: &str, text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| format!("{setting}: {text:?} is not ADDRESS:PORT, for example [::]:8080 or 127.0.0.1:8080"))
}

fn catalog(text: &str) -> Result<Catalog, String> {
    match text.split_once(':') {
        None if text == "kubernetes" => Ok(Catalog::Kubernetes),
        Some(("files", folder)) if !folder.is_empty() => match Path::new(folder).metadata() {
            Ok(metadata) if metadata.is_dir() => Ok(Catalog::Files(folder.into())),
            Ok(_) => Err(format!("CATALOG (--catalog): {folder} is not a folder; name the folder that holds the manifests")),
            Err(error) => Err(format!("CATALOG (--catalog): the folder {folder}: {error}")),
        },
        _ => Err(format!("CATALOG (--catalog): {text:?} is neither `kubernetes` nor `files:FOLDER`")),
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
        assert_eq!((&config.catalog, &config.authenticator), (&Catalog::Kubernetes, &Authenticator::TokenReview));
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
            "--log",
            "a=b=c",
        ];
        let Problems(problems) = parse(&args).unwrap_err();
        assert_eq!(problems.len(), 5, "{problems:#?}");
        for (problem, part) in problems.iter().zip(["LISTEN: \"8080\"", "ADMIN_LISTEN: \"x\"", "/nowhere/at/all", "/nowhere", "LOG"]) {
            assert!(problem.contains(part), "{problem}");
        }
    }

    #[test]
    fn two_listeners_need_two_ports() {
        let Problems(problems) = parse(&["--listen", "127.0.0.1:1", "--admin-listen", "127.0.0.1:1"]).unwrap_err();
        assert_eq!(problems, ["LISTEN and ADMIN_LISTEN are both 127.0.0.1:1; they need two ports"]);
        assert!(parse(&["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]).is_ok());
    }

    #[test]
    fn an_issuer_without_keys_is_a_mistake() {
        assert!(parse(&["--jwks-issuer", "x"]).is_err());
        assert!(parse(&["--authenticator", "jwks"]).is_err());
        assert!(parse(&["--catalog", "files"]).is_err());
    }
}
