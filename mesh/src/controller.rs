//! A gRPC connection to the controller: through the API server to a pod of the cluster, or to a
//! given URL. The connection is TLS, and each call carries a token.

use std::{collections::BTreeSet, io, path::PathBuf, sync::Arc, time::Duration};

use aws_lc_rs::digest;
use clap::Args;
use diy_mesh_injector::containers::{ROOTS, ROOTS_CONFIG_MAP};
use diy_mesh_issuer::hex;
use diy_mesh_proto::{
    TOKEN_AUDIENCE,
    mesh::v1::{
        GetServicesRequest, Service, WatchServicesRequest, WatchServicesResponse,
        service_mesh_service_client::ServiceMeshServiceClient,
    },
};
use diy_mesh_runtime::error_chain;
use hyper::Uri;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec},
    core::v1::{ConfigMap, Pod, ServiceAccount},
};
use kube::{
    Api,
    api::{ListParams, PostParams},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::aws_lc_rs::default_provider,
        pki_types::{CertificateDer, ServerName, pem::PemObject},
        version::TLS13,
    },
};
use tonic::{
    Request, Status, Streaming,
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint},
};
use tower::service_fn;

use crate::{
    cluster::{self, Cluster, ConnectError},
    identity::source::{self, Source},
};

/// How to reach a controller.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Arguments {
    /// The cluster.
    #[command(flatten)]
    pub cluster: cluster::Arguments,
    /// Service account in the namespace of the mesh; the command requests a token for it
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub account: String,
    /// URL of a controller to query instead of one of the cluster
    #[arg(
        long, value_name = "https://HOST:PORT", value_parser = https_url, requires_all = ["token_file", "roots_file"],
        conflicts_with_all = ["context", "namespace", "account"]
    )]
    pub controller: Option<Uri>,
    /// File with a token for --controller
    #[arg(long, value_name = "FILE", requires = "controller")]
    pub token_file: Option<PathBuf>,
    /// File with the trust roots for --controller, PEM
    #[arg(long, value_name = "FILE", requires = "controller")]
    pub roots_file: Option<PathBuf>,
}

/// The controller cannot be reached, or rejects the call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection to the cluster failed.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The controllers of the cluster cannot be found.
    #[error(transparent)]
    Source(#[from] source::Error),
    /// A file cannot be read.
    #[error("failed to read {0}: {1}")]
    File(PathBuf, io::Error),
    /// There is no usable token.
    #[error("no token for the controller: {0}")]
    Token(String),
    /// There are no usable trust roots.
    #[error("no trust roots of the mesh: {0}")]
    Roots(String),
    /// No connection to a controller.
    #[error("failed to connect to the controller {0}: {1}")]
    Unreachable(String, String),
    /// The controller rejects the call.
    #[error("request rejected by the controller: {}: {}", .0.code(), .0.message())]
    Rejected(#[from] Status),
}

/// A connection to a controller.
pub struct Controller {
    client: ServiceMeshServiceClient<Channel>,
    token: MetadataValue<Ascii>,
}

/// A connection before TLS.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// The port of the gRPC server.
const PORT: u16 = 8080;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Shorter than the timeout of an idle connection to the API server.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// The shortest validity that the API server grants, in seconds.
const TOKEN_SECONDS: i64 = 600;
/// A Service with some ten thousand endpoints has a tenth of this size.
const MAX_MESSAGE_SIZE: usize = 64 << 20;

fn https_url(text: &str) -> Result<Uri, String> {
    let uri = text.parse::<Uri>().ok();
    uri.filter(|uri| uri.scheme_str() == Some("https") && uri.host().is_some())
        .ok_or_else(|| {
            "expected an HTTPS URL such as https://controller.service-mesh.svc:8080".into()
        })
}

impl Controller {
    /// Connects to the controller at the given URL, or to the first of the cluster that responds.
    pub async fn connect(arguments: &Arguments) -> Result<Self, Error> {
        match (
            &arguments.controller,
            &arguments.token_file,
            &arguments.roots_file,
        ) {
            (Some(url), Some(token), Some(roots)) => {
                let read = |path: &PathBuf| {
                    std::fs::read_to_string(path).map_err(|error| Error::File(path.clone(), error))
                };
                let (token, roots) = (metadata(&read(token)?)?, certificates(&read(roots)?)?);
                let host = url.host().unwrap_or_default();
                let address = (host, url.port_u16().unwrap_or(PORT));
                let connect = async || Ok(Box::new(TcpStream::connect(address).await?) as _);
                Self::over(&url.to_string(), connect, host, &roots, token).await
            }
            _ => Self::in_cluster(&Cluster::connect(&arguments.cluster).await?, arguments).await,
        }
    }

    async fn in_cluster(cluster: &Cluster, arguments: &Arguments) -> Result<Self, Error> {
        let names = source::controllers(cluster).await?;
        let token = metadata(&request_token(cluster, &arguments.account).await?)?;
        let roots = roots(cluster).await?;
        let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
        let server_name = format!("controller.{}.svc", cluster.namespace);
        let mut unreachable = None;
        for name in names {
            let forward = async || {
                let forwarder = pods.portforward(&name, &[PORT]).await;
                let mut forwarder = forwarder.map_err(io::Error::other)?;
                let stream = forwarder.take_stream(PORT);
                Ok(Box::new(stream.ok_or(io::ErrorKind::NotConnected)?) as _)
            };
            match Self::over(&name, forward, &server_name, &roots, token.clone()).await {
                Err(error) => unreachable = Some(error),
                connected => return connected,
            }
        }
        Err(unreachable.unwrap_or(source::Error::NoPods(cluster.namespace.clone()).into()))
    }

    /// Connects over the stream that `connect` opens. `name` is for messages.
    async fn over(
        name: &str,
        connect: impl AsyncFnOnce() -> io::Result<Box<dyn Io>>,
        server_name: &str,
        roots: &RootCertStore,
        token: MetadataValue<Ascii>,
    ) -> Result<Self, Error> {
        let connected = async {
            let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
                .with_protocol_versions(&[&TLS13])
                .map_err(io::Error::other)?;
            let mut config = config
                .with_root_certificates(roots.clone())
                .with_no_client_auth();
            config.alpn_protocols = vec![b"h2".to_vec()];
            let server_name = ServerName::try_from(server_name.to_owned());
            let server_name = server_name.map_err(io::Error::other)?;
            let tls = TlsConnector::from(Arc::new(config));
            let mut stream = Some(tls.connect(server_name, connect().await?).await?);
            // There is one stream: a lost connection ends the command. With an https URL, tonic
            // would require its own TLS.
            let once = service_fn(move |_: Uri| {
                let stream = stream.take().ok_or(io::ErrorKind::NotConnected);
                async { Ok::<_, io::Error>(TokioIo::new(stream?)) }
            });
            // Pings end a quiet watch if the controller is unavailable, and keep the API server's
            // forwarding open.
            let channel = Endpoint::from_static("http://controller")
                .http2_keep_alive_interval(PING_INTERVAL)
                .keep_alive_while_idle(true)
                .connect_with_connector(once)
                .await;
            channel.map_err(io::Error::other)
        };
        let channel = match timeout(CONNECT_TIMEOUT, connected).await {
            Ok(channel) => channel.map_err(|error| error_chain(&error)),
            Err(_) => Err(format!("timed out after {} s", CONNECT_TIMEOUT.as_secs())),
        };
        let channel = channel.map_err(|error| Error::Unreachable(name.to_owned(), error))?;
        let client = ServiceMeshServiceClient::new(channel);
        Ok(Self {
            client: client.max_decoding_message_size(MAX_MESSAGE_SIZE),
            token,
        })
    }

    /// The named Services ("namespace/name"), or all.
    pub async fn services(&mut self, services: Vec<String>) -> Result<Vec<Service>, Error> {
        let request = self.authorize(GetServicesRequest { services });
        Ok(self
            .client
            .get_services(request)
            .await?
            .into_inner()
            .services)
    }

    /// The named Services, or all, then each change.
    pub async fn watch_services(
        &mut self,
        services: Vec<String>,
    ) -> Result<Streaming<WatchServicesResponse>, Error> {
        let request = self.authorize(WatchServicesRequest { services });
        Ok(self.client.watch_services(request).await?.into_inner())
    }

    fn authorize<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let token = self.token.clone();
        request.metadata_mut().insert("authorization", token);
        request
    }
}

fn metadata(token: &str) -> Result<MetadataValue<Ascii>, Error> {
    let value: Result<MetadataValue<Ascii>, _> = format!("Bearer {}", token.trim()).parse();
    let mut value = value.map_err(|error| Error::Token(error.to_string()))?;
    value.set_sensitive(true);
    Ok(value)
}

fn certificates(pem: &str) -> Result<RootCertStore, Error> {
    let mut store = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let certificate = certificate.map_err(|error| Error::Roots(error.to_string()))?;
        let added = store.add(certificate);
        added.map_err(|error| Error::Roots(error.to_string()))?;
    }
    if store.is_empty() {
        return Err(Error::Roots("the PEM contains no certificate".into()));
    }
    Ok(store)
}

async fn request_token(cluster: &Cluster, account: &str) -> Result<String, Error> {
    let namespace = &cluster.namespace;
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client.clone(), namespace);
    let request = TokenRequest {
        spec: TokenRequestSpec {
            audiences: vec![TOKEN_AUDIENCE.into()],
            expiration_seconds: Some(TOKEN_SECONDS),
            ..TokenRequestSpec::default()
        },
        ..TokenRequest::default()
    };
    let response = accounts
        .create_token_request(account, &PostParams::default(), &request)
        .await;
    let response = response.map_err(|error| cluster::describe_error(&error));
    let token = response.and_then(|response| {
        let status = response.status.map(|status| status.token);
        status.ok_or_else(|| "the response contains none".to_owned())
    });
    token.map_err(|error| {
        Error::Token(format!(
            "failed to create a token of the service account {namespace}/{account}: {error}"
        ))
    })
}

/// The published roots that a controller confirms.
async fn roots(cluster: &Cluster) -> Result<RootCertStore, Error> {
    let responses = Source::Cluster(Box::new(cluster.clone())).fetch().await?;
    let statuses = responses.replicas.values();
    let fingerprints = statuses.flat_map(|status| &status.roots);
    let fingerprints = fingerprints.map(|root| root.fingerprint.clone()).collect();
    let config_maps: Api<ConfigMap> = Api::all(cluster.client.clone());
    let named = ListParams::default().fields(&format!("metadata.name={ROOTS_CONFIG_MAP}"));
    let config_maps = config_maps.list(&named).await;
    let config_maps = config_maps.map_err(|error| Error::Roots(cluster::describe_error(&error)))?;
    let data = config_maps.items.iter().flat_map(|map| &map.data);
    confirmed(data.filter_map(|data| data.get(ROOTS)), &fingerprints)
}

/// The certificates with one of the SHA-256 fingerprints. A client that may write ConfigMaps in
/// one namespace therefore cannot add a root.
fn confirmed<'a>(
    pems: impl Iterator<Item = &'a String>,
    fingerprints: &BTreeSet<String>,
) -> Result<RootCertStore, Error> {
    let is_confirmed = |certificate: &CertificateDer<'_>| {
        let hash = digest::digest(&digest::SHA256, certificate);
        fingerprints.contains(&hex(hash.as_ref()))
    };
    let mut store = RootCertStore::empty();
    for pem in pems {
        let parsed = CertificateDer::pem_slice_iter(pem.as_bytes()).filter_map(Result::ok);
        store.add_parsable_certificates(parsed.filter(is_confirmed));
    }
    if store.is_empty() {
        return Err(Error::Roots(format!(
            "no ConfigMap {ROOTS_CONFIG_MAP} contains a root of the controller; the controller \
             publishes it in each namespace with meshed pods"
        )));
    }
    Ok(store)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    /// A root as PEM, and its fingerprint.
    fn root(name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new([name.to_owned()]).unwrap();
        let certificate = certificate.self_signed(&key).unwrap();
        let hash = digest::digest(&digest::SHA256, certificate.der());
        (certificate.pem(), hex(hash.as_ref()))
    }

    #[test]
    fn trusts_only_roots_that_a_controller_confirms() {
        let ((own, fingerprint), (foreign, _)) = (root("mesh"), root("foreign"));
        let fingerprints = BTreeSet::from([fingerprint]);
        let both = format!("{foreign}{own}");
        let store = confirmed([&foreign, &both].into_iter(), &fingerprints).unwrap();
        assert_eq!(store.roots, certificates(&own).unwrap().roots);
        for (pems, fingerprints) in [
            (vec![&foreign], &fingerprints),
            (vec![], &fingerprints),
            (vec![&own], &BTreeSet::new()),
        ] {
            let error = confirmed(pems.into_iter(), fingerprints).unwrap_err();
            assert!(error.to_string().contains(ROOTS_CONFIG_MAP), "{error}");
        }
    }

    #[test]
    fn rejects_invalid_files_and_urls() {
        assert!(certificates("no PEM").is_err());
        assert!(metadata("two\nlines").is_err());
        assert!(https_url("http://controller:8080").is_err());
        assert!(https_url("https://controller:8080").is_ok());
    }
}
