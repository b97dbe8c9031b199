//! The configuration: command line and environment to [`Flags`], checked as a whole to [`Config`]. The only place that reads
//! the environment.
//!
//! It never opens anything: whether an address can be bound shows when it is.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use crate::patch::{ImagePullPolicy, Settings};

/// The mesh's mutating webhook: adds proxy-init and proxy to the pods that ask for the mesh.
#[derive(Clone, Debug, Default, Parser)]
#[command(name = "injector", version, about)]
pub struct Flags {
    /// Image of the proxy that pods get
    #[arg(long, env, value_name = "IMAGE")]
    pub image_to_deploy_proxy: Option<String>,
    /// Image of the proxy-init that pods get
    #[arg(long, env, value_name = "IMAGE")]
    pub image_to_deploy_proxy_init: Option<String>,
    /// When the kubelet pulls these images: Always, IfNotPresent or Never [default: IfNotPresent]
    #[arg(long, env, value_name = "POLICY")]
    pub image_pull_policy: Option<String>,
    /// Where proxies find the controller [default: `https://controller.service-mesh.svc.cluster.local.:8080`]
    #[arg(long, env, value_name = "URL")]
    pub controller_address: Option<String>,
    /// Whom the controller's certificate must name, as proxies see it
    /// [default: `spiffe://cluster.local/ns/POD_NAMESPACE/sa/controller`]
    #[arg(long, env, value_name = "SPIFFE-ID")]
    pub controller_identity: Option<String>,
    /// Address of the webhook (HTTPS) [default: `[::]:8443`]
    #[arg(long, env, value_name = "ADDRESS:PORT")]
    pub listen: Option<String>,
    /// Address of /live, /ready and /metrics (HTTP) [default: `[::]:8081`]
    #[arg(long, env, value_name = "ADDRESS:PORT")]
    pub admin_listen: Option<String>,
    /// The namespace that the injector runs in [default: service-mesh]
    #[arg(long, env, value_name = "NAMESPACE")]
    pub pod_namespace: Option<String>,
    /// Where the serving certificate is kept: kubernetes (a Secret, with the webhook's caBundle kept right) or ephemeral
    /// (in memory, its CA written to --ca-file) [default: kubernetes]
    #[arg(long, env, value_name = "HOW")]
    pub serving_certificate: Option<String>,
    /// With --serving-certificate ephemeral: the file that gets the CA
    #[arg(long, env, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// With --serving-certificate kubernetes: the MutatingWebhookConfiguration whose caBundle is kept right
    /// [default: diy-service-mesh-injector]
    #[arg(long, env, value_name = "NAME")]
    pub webhook_configuration: Option<String>,
    /// Further names and addresses for the serving certificate, separated by commas
    #[arg(long, env, value_name = "NAMES")]
    pub extra_san: Option<String>,
    /// How many seconds it still answers new connections after SIGTERM, until every API server knows
    /// [default: 5 with kubernetes, 0 with ephemeral]
    #[arg(long, env, value_name = "SECONDS")]
    pub shutdown_delay: Option<String>,
    /// What is logged: error, warn, info, debug or trace, or a filter by module, such as info,diy_mesh_injector=debug [default: info]
    #[arg(long, env, value_name = "FILTER")]
    pub log: Option<String>,
}

/// A checked configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// What is injected.
    pub settings: Settings,
    /// Where the webhook listens.
    pub listen: SocketAddr,
    /// Where the admin server listens.
    pub admin_listen: SocketAddr,
    /// Where the serving certificate is kept.
    pub serving_certificate: ServingCertificate,
    /// Further names for the serving certificate.
    pub extra_names: Vec<String>,
    /// How long new connections are still answered after the signal to stop.
    pub shutdown_delay: Duration,
}

/// Where the serving certificate is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServingCertificate {
    /// In a Secret that all replicas share.
    Kubernetes {
        /// The MutatingWebhookConfiguration whose caBundle is kept right.
        webhook_configuration: String,
    },
    /// In memory; whoever calls the webhook reads the CA from this file.
    Ephemeral {
        /// The file that gets the CA.
        ca_file: PathBuf,
    },
}

/// Everything that is wrong with a configuration.
#[derive(Debug, PartialEq, Eq)]
pub struct Problems(pub Vec<String>);

impl fmt::Display for Problems {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "the configuration has {} problem(s):",
            self.0.len()
        )?;
        self.0
            .iter()
            .try_for_each(|problem| write!(formatter, "\n  - {problem}"))
    }
}

impl std::error::Error for Problems {}

impl Config {
    /// Checks all of the flags and tells all that is wrong at once.
    pub fn from_flags(flags: Flags) -> Result<Self, Problems> {
        let mut check = Checks::default();
        let serving_certificate = check.serving_certificate(&flags);
        let usual_delay = if matches!(serving_certificate, ServingCertificate::Kubernetes { .. }) {
            5
        } else {
            0
        };
        let mesh_namespace = check.namespace(flags.pod_namespace);
        let config = Self {
            settings: Settings {
                proxy_image: check.image("IMAGE_TO_DEPLOY_PROXY", flags.image_to_deploy_proxy),
                proxy_init_image: check.image(
                    "IMAGE_TO_DEPLOY_PROXY_INIT",
                    flags.image_to_deploy_proxy_init,
                ),
                image_pull_policy: check.image_pull_policy(flags.image_pull_policy),
                controller_address: check.controller_address(flags.controller_address),
                controller_identity: check
                    .controller_identity(flags.controller_identity, &mesh_namespace),
                mesh_namespace,
            },
            listen: check.address("LISTEN", flags.listen, "[::]:8443"),
            admin_listen: check.address("ADMIN_LISTEN", flags.admin_listen, "[::]:8081"),
            serving_certificate,
            extra_names: check.names(flags.extra_san),
            shutdown_delay: Duration::from_secs(
                check.shutdown_delay(flags.shutdown_delay, usual_delay),
            ),
        };
        if check.0.is_empty() {
            Ok(config)
        } else {
            Err(Problems(check.0))
        }
    }
}

/// The problems so far. Each check gives a value in any case, so that the next ones can run.
#[derive(Default)]
struct Checks(Vec<String>);

impl Checks {
    fn image(&mut self, name: &str, value: Option<String>) -> String {
        let value = given(value).unwrap_or_default();
        if value.is_empty() {
            self.0.push(format!(
                "{name} is required: the image that pods get, such as diy-sm-proxy:dev"
            ));
        } else if value.contains(|c: char| c.is_whitespace() || c.is_control()) {
            self.0.push(format!(
                "{name} is {value:?}, expected an image's name without blanks"
            ));
        }
        value
    }

    fn image_pull_policy(&mut self, value: Option<String>) -> ImagePullPolicy {
        let Some(value) = given(value) else {
            return ImagePullPolicy::IfNotPresent;
        };
        let policy = ImagePullPolicy::ALL
            .into_iter()
            .find(|policy| policy.as_str() == value);
        policy.unwrap_or_else(|| {
            self.0.push(format!(
                "IMAGE_PULL_POLICY is {value:?}, expected Always, IfNotPresent or Never"
            ));
            ImagePullPolicy::IfNotPresent
        })
    }

    fn controller_address(&mut self, value: Option<String>) -> String {
        let value = given(value)
            .unwrap_or_else(|| "https://controller.service-mesh.svc.cluster.local.:8080".into());
        let is_url = value
            .parse::<http::Uri>()
            .is_ok_and(|uri| uri.scheme_str() == Some("https") && uri.host().is_some());
        if !is_url {
            self.0.push(format!(
                "CONTROLLER_ADDRESS is {value:?}, expected a URL such as https://controller:8080 (the controller speaks TLS)"
            ));
        }
        value
    }

    fn controller_identity(&mut self, value: Option<String>, mesh_namespace: &str) -> String {
        let value = given(value)
            .unwrap_or_else(|| format!("spiffe://cluster.local/ns/{mesh_namespace}/sa/controller"));
        let parts: Vec<&str> = value.split('/').collect();
        let fits = matches!(parts[..], ["spiffe:", "", domain, "ns", namespace, "sa", account]
            if [domain, namespace, account].iter().all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_graphic())));
        if !fits {
            self.0.push(format!("CONTROLLER_IDENTITY is {value:?}, expected spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/SERVICE-ACCOUNT"));
        }
        value
    }

    fn namespace(&mut self, value: Option<String>) -> String {
        let value = given(value).unwrap_or_else(|| "service-mesh".into());
        let fits = value.len() <= 63 && !value.starts_with('-') && !value.ends_with('-');
        if !fits
            || !value
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        {
            self.0.push(format!(
                "POD_NAMESPACE is {value:?}, expected the name of a namespace"
            ));
        }
        value
    }

    fn address(&mut self, name: &str, value: Option<String>, usual: &str) -> SocketAddr {
        let value = given(value).unwrap_or_else(|| usual.into());
        value.parse().unwrap_or_else(|_| {
            self.0.push(format!("{name} is {value:?}, expected an IP address and a port, such as {usual} or 127.0.0.1:8443"));
            SocketAddr::from(([0, 0, 0, 0], 0))
        })
    }

    fn serving_certificate(&mut self, flags: &Flags) -> ServingCertificate {
        match (
            given(flags.serving_certificate.clone())
                .as_deref()
                .unwrap_or("kubernetes"),
            &flags.ca_file,
        ) {
            ("kubernetes", None) => {}
            ("kubernetes", Some(_)) => self
                .0
                .push("CA_FILE goes with SERVING_CERTIFICATE=ephemeral only".into()),
            ("ephemeral", Some(ca_file)) => {
                return ServingCertificate::Ephemeral {
                    ca_file: ca_file.clone(),
                };
            }
            ("ephemeral", None) => self.0.push(
                "SERVING_CERTIFICATE=ephemeral needs CA_FILE, the file that gets the CA".into(),
            ),
            (other, _) => self.0.push(format!(
                "SERVING_CERTIFICATE is {other:?}, expected kubernetes or ephemeral"
            )),
        }
        let webhook_configuration = given(flags.webhook_configuration.clone())
            .unwrap_or_else(|| "diy-service-mesh-injector".into());
        ServingCertificate::Kubernetes {
            webhook_configuration,
        }
    }

    fn names(&mut self, value: Option<String>) -> Vec<String> {
        let value = given(value).unwrap_or_default();
        let names: Vec<String> = value
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .map(String::from)
            .collect();
        for name in &names {
            if rustls::pki_types::ServerName::try_from(name.as_str()).is_err() {
                self.0.push(format!(
                    "EXTRA_SAN has {name:?}, expected a DNS name or an IP address"
                ));
            }
        }
        names
    }

    fn shutdown_delay(&mut self, value: Option<String>, usual: u64) -> u64 {
        let Some(value) = given(value) else {
            return usual;
        };
        value
            .parse()
            .ok()
            .filter(|seconds| *seconds <= 300)
            .unwrap_or_else(|| {
                self.0.push(format!(
                    "SHUTDOWN_DELAY is {value:?}, expected a number of seconds up to 300"
                ));
                usual
            })
    }
}

/// A variable that is set to nothing counts as not set.
fn given(value: Option<String>) -> Option<String> {
    value.filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(arguments: &[&str]) -> Flags {
        Flags::parse_from(["injector"].iter().chain(arguments))
    }

    const IMAGES: [&str; 2] = [
        "--image-to-deploy-proxy=proxy:1",
        "--image-to-deploy-proxy-init=init:1",
    ];

    #[test]
    fn two_images_are_all_it_takes() {
        let config = Config::from_flags(flags(&IMAGES)).expect("complete");
        assert_eq!(config.settings.proxy_image, "proxy:1");
        assert_eq!(config.settings.proxy_init_image, "init:1");
        assert_eq!(
            config.settings.image_pull_policy,
            ImagePullPolicy::IfNotPresent
        );
        assert_eq!(
            config.settings.controller_address,
            "https://controller.service-mesh.svc.cluster.local.:8080"
        );
        assert_eq!(
            config.settings.controller_identity,
            "spiffe://cluster.local/ns/service-mesh/sa/controller"
        );
        assert_eq!(config.settings.mesh_namespace, "service-mesh");
        assert_eq!(config.listen.to_string(), "[::]:8443");
        assert_eq!(config.admin_listen.to_string(), "[::]:8081");
        let webhook_configuration = "diy-service-mesh-injector".into();
        assert_eq!(
            config.serving_certificate,
            ServingCertificate::Kubernetes {
                webhook_configuration
            }
        );
        assert_eq!(config.shutdown_delay, Duration::from_secs(5));
    }

    #[test]
    fn the_sandbox_needs_no_kubernetes_and_does_not_linger() {
        let config = Config::from_flags(flags(
            &[
                &IMAGES[..],
                &["--serving-certificate=ephemeral", "--ca-file=/tmp/ca"],
            ]
            .concat(),
        ));
        let config = config.expect("complete");
        assert_eq!(
            config.serving_certificate,
            ServingCertificate::Ephemeral {
                ca_file: "/tmp/ca".into()
            }
        );
        assert_eq!(config.shutdown_delay, Duration::ZERO);
    }

    #[test]
    fn every_problem_is_in_one_report() {
        let problems = Config::from_flags(flags(&[
            "--image-pull-policy=Sometimes",
            "--controller-address=http://controller:8080",
            "--controller-identity=controller",
            "--listen=8443",
            "--admin-listen=localhost:1",
            "--pod-namespace=-a",
            "--serving-certificate=ephemeral",
            "--extra-san=ok.example, not a name",
            "--shutdown-delay=soon",
        ]));
        let report = problems.expect_err("eleven problems").to_string();
        for name in [
            "has 11 problem",
            "IMAGE_TO_DEPLOY_PROXY is required",
            "IMAGE_TO_DEPLOY_PROXY_INIT is required",
            "IMAGE_PULL_POLICY is \"Sometimes\"",
            "CONTROLLER_ADDRESS is \"http://controller:8080\"",
            "CONTROLLER_IDENTITY is \"controller\"",
            "ADMIN_LISTEN is \"localhost:1\"",
            "LISTEN is \"8443\"",
            "POD_NAMESPACE is \"-a\"",
            "needs CA_FILE",
            "EXTRA_SAN has \"not a name\"",
            "SHUTDOWN_DELAY is \"soon\"",
        ] {
            assert!(report.contains(name), "{name} is not in: {report}");
        }
    }
}
