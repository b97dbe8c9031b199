//! Configuration: [`Flags`] are read from the command line and the environment, [`Config`] is
//! checked. No other module reads the environment.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches, Parser, ValueEnum};
use diy_mesh_model::identity::{Identity, TRUST_DOMAIN};
use diy_mesh_runtime::LogFormat;
use serde::Serialize;

use crate::settings::SidecarSettings;

const SHUTDOWN_DELAY_KUBERNETES: u64 = 5;
const SHUTDOWN_DELAY_EPHEMERAL: u64 = 0;

/// The mutating webhook of the mesh: adds proxy-init and proxy to the pods that request injection.
#[derive(Clone, Debug, Parser)]
#[command(name = "injector", version, about)]
pub struct Flags {
    /// Image of the proxy container [default: the image of init container proxy-image of the
    /// injector's pod]
    #[arg(long, env, value_name = "IMAGE", value_parser = image, required_unless_present = "pod_name")]
    pub image_to_deploy_proxy: Option<String>,
    /// Image of the proxy-init container [default: the image of init container proxy-init-image of
    /// the injector's pod]
    #[arg(long, env, value_name = "IMAGE", value_parser = image, required_unless_present = "pod_name")]
    pub image_to_deploy_proxy_init: Option<String>,
    /// Name of the injector's pod [required without the images]
    #[arg(long, env, value_name = "NAME")]
    pub pod_name: Option<String>,
    /// Pull policy of both images
    #[arg(long, env, value_name = "POLICY", default_value = "IfNotPresent")]
    pub image_pull_policy: ImagePullPolicy,
    /// URL of the controller, passed to proxies
    /// [default: `https://controller.POD_NAMESPACE.svc.cluster.local.:8080`]
    #[arg(long, env, value_name = "URL", value_parser = controller_url)]
    pub controller_address: Option<String>,
    /// Identity that proxies expect in the controller's certificate
    /// [default: `spiffe://TRUST_DOMAIN/ns/POD_NAMESPACE/sa/controller`]
    #[arg(long, env, value_name = "SPIFFE-ID")]
    pub controller_identity: Option<Identity>,
    /// Trust domain of the controller
    #[arg(long, env, value_name = "DOMAIN", value_parser = trust_domain, default_value = TRUST_DOMAIN)]
    pub trust_domain: String,
    /// The defaults of proxies.
    #[command(flatten)]
    pub proxy: SidecarSettings,
    /// Address of the webhook (HTTPS)
    #[arg(long, env, value_name = "ADDRESS:PORT", default_value = "[::]:8443")]
    pub listen: SocketAddr,
    /// Address of /live, /ready and /metrics (HTTP)
    #[arg(long, env, value_name = "ADDRESS:PORT", default_value = "[::]:8081")]
    pub admin_listen: SocketAddr,
    /// Namespace of the injector, whose pods are never injected
    #[arg(long, env, value_name = "NAMESPACE", value_parser = namespace, default_value = "service-mesh")]
    pub pod_namespace: String,
    /// Folder with the Namespaces as NAME.json, in place of the Kubernetes API
    #[arg(long, env, value_name = "FOLDER")]
    pub namespaces_folder: Option<PathBuf>,
    /// Storage of the serving certificate
    #[arg(long, env, value_name = "STORAGE", default_value = "kubernetes")]
    pub serving_certificate: CertificateStorage,
    /// File for the CA certificate, with --serving-certificate ephemeral
    #[arg(
        long,
        env,
        value_name = "FILE",
        required_if_eq("serving_certificate", "ephemeral")
    )]
    pub ca_file: Option<PathBuf>,
    /// MutatingWebhookConfiguration whose caBundle the injector writes, with --serving-certificate
    /// kubernetes
    #[arg(
        long,
        env,
        value_name = "NAME",
        default_value = "diy-service-mesh-injector"
    )]
    pub webhook_configuration: String,
    /// Additional DNS names and IP addresses of the serving certificate, separated by commas
    #[arg(long, env, value_name = "NAMES", value_delimiter = ',', value_parser = alternative_name)]
    pub extra_san: Vec<String>,
    /// Seconds for which new connections are accepted after SIGTERM, while API servers still send
    /// requests; at most 300
    /// [default: 5 with kubernetes, 0 with ephemeral]
    #[arg(long, env, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=300))]
    pub shutdown_delay: Option<u64>,
    /// Log level (error, warn, info, debug, trace) or a filter by module, such as
    /// info,diy_mesh_injector=debug [default: info]
    #[arg(long, env, value_name = "FILTER")]
    pub log: Option<String>,
    /// Format of the log
    #[arg(long, env, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

/// The pull policy of an image, as in a Kubernetes container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[value(rename_all = "verbatim")]
pub enum ImagePullPolicy {
    /// Pull at every start
    Always,
    /// Pull if the node does not have the image
    IfNotPresent,
    /// Never pull
    Never,
}

/// The storage of the serving certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CertificateStorage {
    /// A Secret; the injector writes the webhook's caBundle
    Kubernetes,
    /// Memory; the injector writes the CA certificate to --ca-file
    Ephemeral,
}

impl Flags {
    /// Reads the command line and the environment. Prints errors and exits, as [`Parser::parse`]
    /// does. An empty variable counts as unset.
    pub fn parse_process() -> Self {
        let command = Self::command().mut_args(|arg| match arg.get_env() {
            Some(name) if std::env::var_os(name).is_some_and(|value| value.is_empty()) => {
                arg.env(None::<&str>)
            }
            _ => arg,
        });
        Self::from_arg_matches(&command.get_matches()).unwrap_or_else(|error| error.exit())
    }
}

/// The content of injected containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The image of the proxy. Empty until it is read from the injector's pod.
    pub proxy_image: String,
    /// The image of proxy-init. Empty until it is read from the injector's pod.
    pub proxy_init_image: String,
    /// The pull policy of both.
    pub image_pull_policy: ImagePullPolicy,
    /// The URL of the controller.
    pub controller_address: String,
    /// The SPIFFE ID that the controller's certificate must have.
    pub controller_identity: String,
    /// The namespace of the mesh itself. Its pods are not injected.
    pub mesh_namespace: String,
    /// The defaults of proxies.
    pub proxy: SidecarSettings,
}

impl Settings {
    /// Settings that decide about pods like the settings of the mesh in this namespace, without
    /// images and addresses.
    pub fn of_mesh(mesh_namespace: &str) -> Self {
        Self {
            proxy_image: String::new(),
            proxy_init_image: String::new(),
            image_pull_policy: ImagePullPolicy::IfNotPresent,
            controller_address: String::new(),
            controller_identity: String::new(),
            mesh_namespace: mesh_namespace.to_owned(),
            proxy: SidecarSettings::default(),
        }
    }
}

/// A checked configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The content of injected containers.
    pub settings: Settings,
    /// The injector's pod, if it has the images of injected containers.
    pub pod_with_images: Option<String>,
    /// The address of the webhook.
    pub listen: SocketAddr,
    /// The address of the admin server.
    pub admin_listen: SocketAddr,
    /// The folder with the Namespaces, if they are not read from Kubernetes.
    pub namespaces_folder: Option<PathBuf>,
    /// The storage of the serving certificate.
    pub serving_certificate: ServingCertificate,
    /// Additional names of the serving certificate.
    pub extra_names: Vec<String>,
    /// The time for which new connections are accepted after the shutdown signal.
    pub shutdown_delay: Duration,
}

/// The storage of the serving certificate, with its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServingCertificate {
    /// A Secret that all replicas share.
    Kubernetes {
        /// The MutatingWebhookConfiguration whose `caBundle` the injector writes.
        webhook_configuration: String,
    },
    /// Memory.
    Ephemeral {
        /// The file for the CA certificate.
        ca_file: PathBuf,
    },
}

/// Flags that contradict each other.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "CA_FILE (--ca-file) requires SERVING_CERTIFICATE=ephemeral; unset CA_FILE, or set SERVING_CERTIFICATE"
)]
pub struct UnexpectedCaFile;

impl Config {
    /// Checks the flags that depend on each other and fills in the defaults that do.
    pub fn from_flags(flags: Flags) -> Result<Self, UnexpectedCaFile> {
        let (serving_certificate, default_shutdown_delay) =
            match (flags.serving_certificate, flags.ca_file) {
                (CertificateStorage::Ephemeral, Some(ca_file)) => (
                    ServingCertificate::Ephemeral { ca_file },
                    SHUTDOWN_DELAY_EPHEMERAL,
                ),
                (_, None) => {
                    let webhook_configuration = flags.webhook_configuration;
                    let storage = ServingCertificate::Kubernetes {
                        webhook_configuration,
                    };
                    (storage, SHUTDOWN_DELAY_KUBERNETES)
                }
                (CertificateStorage::Kubernetes, Some(_)) => return Err(UnexpectedCaFile),
            };
        let mesh_namespace = flags.pod_namespace;
        let default_address =
            || format!("https://controller.{mesh_namespace}.svc.cluster.local.:8080");
        let identity = flags.controller_identity.unwrap_or_else(|| {
            Identity::new(&flags.trust_domain, &mesh_namespace, "controller")
                .expect("trust domain and namespace are valid in an identity")
        });
        let has_images =
            flags.image_to_deploy_proxy.is_some() && flags.image_to_deploy_proxy_init.is_some();
        Ok(Self {
            pod_with_images: flags.pod_name.filter(|_| !has_images),
            settings: Settings {
                proxy_image: flags.image_to_deploy_proxy.unwrap_or_default(),
                proxy_init_image: flags.image_to_deploy_proxy_init.unwrap_or_default(),
                image_pull_policy: flags.image_pull_policy,
                controller_address: flags.controller_address.unwrap_or_else(default_address),
                controller_identity: identity.to_string(),
                mesh_namespace,
                proxy: flags.proxy,
            },
            listen: flags.listen,
            admin_listen: flags.admin_listen,
            namespaces_folder: flags.namespaces_folder,
            serving_certificate,
            extra_names: flags
                .extra_san
                .into_iter()
                .filter(|name| !name.is_empty())
                .collect(),
            shutdown_delay: Duration::from_secs(
                flags.shutdown_delay.unwrap_or(default_shutdown_delay),
            ),
        })
    }
}

fn image(value: &str) -> Result<String, &'static str> {
    if value.is_empty() || value.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err("expected an image name without spaces, such as diy-sm-proxy:dev");
    }
    Ok(value.into())
}

fn controller_url(value: &str) -> Result<String, &'static str> {
    match value.parse::<http::Uri>() {
        Ok(uri) if uri.scheme_str() == Some("https") && uri.host().is_some() => Ok(value.into()),
        _ => Err("expected an https URL, such as https://controller:8080"),
    }
}

fn trust_domain(value: &str) -> Result<String, String> {
    let identity = Identity::new(value, "namespace", "name");
    identity
        .map(|_| value.into())
        .map_err(|error| error.to_string())
}

/// Accepts the name of a namespace.
pub(crate) fn namespace(value: &str) -> Result<String, &'static str> {
    let is_label = (1..=63).contains(&value.len())
        && !value.starts_with('-')
        && !value.ends_with('-')
        && value
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    if is_label {
        Ok(value.into())
    } else {
        Err("expected a namespace: at most 63 lower-case letters, digits and hyphens")
    }
}

/// Accepts an empty text, which a trailing comma leaves.
fn alternative_name(value: &str) -> Result<String, &'static str> {
    let name = value.trim();
    if name.is_empty() || rustls::pki_types::ServerName::try_from(name).is_ok() {
        Ok(name.into())
    } else {
        Err("expected a DNS name or an IP address")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGES: [&str; 2] = [
        "--image-to-deploy-proxy=proxy:1",
        "--image-to-deploy-proxy-init=init:1",
    ];

    fn parse(arguments: &[&str]) -> Result<Flags, clap::Error> {
        Flags::try_parse_from(["injector"].iter().chain(&IMAGES).chain(arguments))
    }

    fn config(arguments: &[&str]) -> Config {
        Config::from_flags(parse(arguments).expect("valid flags")).expect("consistent flags")
    }

    #[test]
    fn requires_only_the_images() {
        let config = config(&[]);
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
        let error = Flags::try_parse_from(["injector"]).expect_err("no images");
        let text = error.to_string();
        assert!(text.contains("--image-to-deploy-proxy <IMAGE>"), "{text}");
        assert!(
            text.contains("--image-to-deploy-proxy-init <IMAGE>"),
            "{text}"
        );
    }

    #[test]
    fn ephemeral_storage_has_no_shutdown_delay() {
        let config = config(&["--serving-certificate=ephemeral", "--ca-file=/tmp/ca"]);
        assert_eq!(
            config.serving_certificate,
            ServingCertificate::Ephemeral {
                ca_file: "/tmp/ca".into()
            }
        );
        assert_eq!(config.shutdown_delay, Duration::ZERO);
    }

    #[test]
    fn accepts_valid_values() {
        let config = config(&[
            "--image-pull-policy=Never",
            "--pod-namespace=mesh",
            "--extra-san=ok.example, 10.0.0.1,",
            "--shutdown-delay=300",
        ]);
        assert_eq!(config.settings.image_pull_policy, ImagePullPolicy::Never);
        assert_eq!(
            config.settings.controller_identity,
            "spiffe://cluster.local/ns/mesh/sa/controller"
        );
        assert_eq!(
            config.settings.controller_address,
            "https://controller.mesh.svc.cluster.local.:8080"
        );
        assert_eq!(config.extra_names, ["ok.example", "10.0.0.1"]);
        assert_eq!(config.shutdown_delay, Duration::from_secs(300));
    }

    #[test]
    fn rejects_invalid_values_with_flag_and_value() {
        for (flag, value) in [
            ("--image-pull-policy", "Sometimes"),
            ("--controller-address", "http://controller:8080"),
            ("--controller-identity", "controller"),
            ("--listen", "8443"),
            ("--admin-listen", "localhost:1"),
            ("--pod-namespace", "-a"),
            ("--extra-san", "not a name"),
            ("--shutdown-delay", "soon"),
            ("--shutdown-delay", "301"),
            ("--serving-certificate", "file"),
            ("--proxy-cpu-request", "none"),
            ("--proxy-memory-limit", "16Mi"),
            ("--proxy-drain", "2h"),
            ("--proxy-dump", "loud"),
        ] {
            let error = parse(&[&format!("{flag}={value}")])
                .expect_err(value)
                .to_string();
            assert!(error.contains(flag) && error.contains(value), "{error}");
        }
        for image in ["", "a b"] {
            let image = format!("--image-to-deploy-proxy={image}");
            let arguments = ["injector", &image, IMAGES[1]];
            let error = Flags::try_parse_from(arguments)
                .expect_err("invalid image")
                .to_string();
            assert!(error.contains("--image-to-deploy-proxy"), "{error}");
        }
    }

    #[test]
    fn pod_provides_the_images_that_no_flag_sets() {
        let parse = |arguments: &[&str]| {
            let flags = Flags::try_parse_from(["injector"].iter().chain(arguments));
            Config::from_flags(flags.expect("valid flags")).expect("consistent flags")
        };
        assert_eq!(
            parse(&["--pod-name=a"]).pod_with_images.as_deref(),
            Some("a")
        );
        let one = parse(&["--pod-name=a", IMAGES[1]]);
        assert_eq!(one.pod_with_images.as_deref(), Some("a"));
        assert_eq!(one.settings.proxy_init_image, "init:1");
        assert_eq!(
            parse(&["--pod-name=a", IMAGES[0], IMAGES[1]]).pod_with_images,
            None
        );
    }

    #[test]
    fn ca_file_belongs_to_ephemeral_storage() {
        let error = parse(&["--serving-certificate=ephemeral"]).expect_err("no file");
        assert!(error.to_string().contains("--ca-file <FILE>"), "{error}");
        let flags = parse(&["--ca-file=/tmp/ca"]).expect("valid flags");
        assert_eq!(Config::from_flags(flags), Err(UnexpectedCaFile));
    }
}
