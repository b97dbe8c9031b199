//! Fetches the keys of issuers: from Secrets, and from URLs that the operator of the mesh allows. A
//! URL is asked without proxies and redirects, at an address that was checked, so that a policy does
//! not make the controller a client of what only the controller reaches.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use diy_mesh_jwt::Keys;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use rustls::CertificateError;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_rustls::TlsConnector;

use crate::api::{self, API_TIMEOUT};
use crate::kinds::authorization::keys::MAX_KEY_BYTES;
use crate::object::Key;
use crate::object::issuer_keys::Source;
use crate::publish::Hub;
use crate::publish::turns::Turns;

/// Time for a response of an issuer.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two looks for attempts that are due.
const REVIEW_INTERVAL: Duration = Duration::from_secs(2);
/// Attempts at a time. Namespaces take turns.
const MAX_ATTEMPTS: usize = 16;

/// The sources of keys that the operator of the mesh allows.
#[derive(Clone, Debug, Default)]
pub struct Allowed {
    /// URLs of keys.
    pub urls: BTreeSet<String>,
    /// URLs whose hosts may have private addresses.
    pub private_urls: BTreeSet<String>,
    /// A file with the certificates of CAs, in PEM.
    pub roots: PathBuf,
}

/// Fetches keys.
pub struct Fetcher {
    /// The client for Secrets. `None`: Secrets cannot be read.
    client: Option<Client>,
    allowed: Allowed,
}

impl Fetcher {
    /// A fetcher.
    pub fn new(client: Option<Client>, allowed: Allowed) -> Fetcher {
        Fetcher { client, allowed }
    }

    /// Fetches the keys of all sources, each again and again. Never ends.
    pub async fn run(&self, hub: &Hub) -> Infallible {
        hub.synced().await;
        let (mut turns, mut attempts) = (Turns::default(), FuturesUnordered::new());
        let mut review = interval(REVIEW_INTERVAL);
        review.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            while attempts.len() < MAX_ATTEMPTS
                && let Some((source, _)) = turns.next()
            {
                attempts.push(self.attempt(source));
            }
            tokio::select! {
                _ = review.tick() => {
                    let now = Instant::now();
                    for (namespace, source) in hub.begin_fetches(now) {
                        turns.add(namespace, source, now);
                    }
                }
                Some((source, result)) = attempts.next() => {
                    let error = result.as_ref().err().cloned();
                    let is_changed = hub.end_fetch(&source, result, Instant::now());
                    if let Some(error) = error.filter(|_| is_changed) {
                        tracing::warn!("cannot fetch the keys of {source}: {error}");
                    }
                }
            }
        }
    }

    async fn attempt(&self, source: Source) -> (Source, Result<String, String>) {
        let result = self.fetch(&source).await;
        (source, result)
    }

    /// The keys of a source.
    async fn fetch(&self, source: &Source) -> Result<String, String> {
        let keys = match source {
            Source::Secret(key, entry) => self.secret(key, entry).await?,
            Source::Url(url) => {
                let fetched = timeout(FETCH_TIMEOUT, self.url(url)).await;
                let late = |_| format!("no response within {FETCH_TIMEOUT:?}");
                fetched.map_err(late)??
            }
        };
        if keys.len() > MAX_KEY_BYTES {
            return Err(format!(
                "{} bytes are more than {MAX_KEY_BYTES}",
                keys.len()
            ));
        }
        // An error of the parser may contain a part of the Secret, and more accounts may read the
        // status.
        let public = Keys::public(keys.as_bytes());
        public.map_err(|_| "it is no JWK set with a public key for tokens".to_owned())
    }

    async fn secret(&self, key: &Key, entry: &str) -> Result<String, String> {
        let client = self
            .client
            .clone()
            .ok_or("there is no cluster with Secrets")?;
        let secrets: Api<Secret> = Api::namespaced(client, &key.namespace);
        let secret = api::request(API_TIMEOUT, secrets.get(&key.name)).await;
        let secret = secret.map_err(|error| error.to_string())?;
        let value = secret.data.unwrap_or_default().remove(entry);
        let value = value.ok_or_else(|| format!("the Secret has no key {entry}"))?;
        String::from_utf8(value.0).map_err(|_| "it is no text".to_owned())
    }

    async fn url(&self, url: &str) -> Result<String, String> {
        let may_be_private = self.allowed.private_urls.contains(url);
        if !may_be_private && !self.allowed.urls.contains(url) {
            return Err("the operator of the mesh has not allowed the URL (--key-urls)".to_owned());
        }
        let uri: Uri = url.parse().map_err(|error| format!("{error}"))?;
        let authority = uri.authority().ok_or("it has no host")?;
        let host = authority.host().trim_matches(['[', ']']);
        let port = authority.port_u16().unwrap_or(443);
        let addresses = tokio::net::lookup_host((host, port)).await;
        let addresses = addresses.map_err(|error| format!("cannot resolve {host}: {error}"))?;
        let is_allowed = |address: &SocketAddr| may_be_private || is_public(address.ip());
        let addresses: Vec<SocketAddr> = addresses.filter(is_allowed).collect();
        if addresses.is_empty() {
            return Err(format!(
                "{host} has only private addresses, for which --private-key-urls is required"
            ));
        }
        let stream = TcpStream::connect(&*addresses).await;
        let stream = stream.map_err(|error| format!("cannot connect to {host}: {error}"))?;
        let name = ServerName::try_from(host.to_owned()).map_err(|error| error.to_string())?;
        let stream = self.tls()?.connect(name, stream).await;
        let stream = stream.map_err(|error| format!("TLS with {host}: {}", tls_error(&error)))?;
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        let request = Request::get(path)
            .header(header::HOST, authority.as_str())
            .header(header::ACCEPT, "application/jwk-set+json, application/json")
            .body(Empty::<Bytes>::new());
        let request = request.map_err(|error| error.to_string())?;
        get(TokioIo::new(stream), request).await
    }

    /// TLS with the roots of the file.
    fn tls(&self) -> Result<TlsConnector, String> {
        let file = &self.allowed.roots;
        let unreadable = |error| format!("cannot read {}: {error}", file.display());
        let mut roots = rustls::RootCertStore::empty();
        let certificates = CertificateDer::pem_file_iter(file).map_err(unreadable)?;
        roots.add_parsable_certificates(certificates.filter_map(Result::ok));
        let config = rustls::ClientConfig::builder().with_root_certificates(roots);
        Ok(TlsConnector::from(Arc::new(config.with_no_client_auth())))
    }
}

async fn get(
    stream: TokioIo<tokio_rustls::client::TlsStream<TcpStream>>,
    request: Request<Empty<Bytes>>,
) -> Result<String, String> {
    let failed = |error: hyper::Error| error.to_string();
    let (mut sender, connection) = http1::handshake(stream).await.map_err(failed)?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(failed)?;
        if response.status() != StatusCode::OK {
            return Err(format!("the response is {}", response.status()));
        }
        let body = Limited::new(response.into_body(), MAX_KEY_BYTES)
            .collect()
            .await;
        let body = body.map_err(|error| error.to_string())?.to_bytes();
        String::from_utf8(body.into()).map_err(|_| "it is no text".to_owned())
    };
    tokio::select! {
        result = exchange => result,
        Err(error) = connection => Err(failed(error)),
    }
}

/// The text of an error of TLS. Errors about the validity of a certificate contain the time, and
/// each change of a status is a write.
fn tls_error(error: &io::Error) -> String {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        Some(rustls::Error::InvalidCertificate(CertificateError::ExpiredContext { .. })) => {
            "the certificate has expired".to_owned()
        }
        Some(rustls::Error::InvalidCertificate(CertificateError::NotValidYetContext {
            ..
        })) => "the certificate is not valid yet".to_owned(),
        _ => error.to_string(),
    }
}

/// Whether an address is one of the Internet, and has no special purpose (RFC 6890).
fn is_public(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => {
            let is_reserved = match address.octets() {
                // This network; class E and broadcast.
                [0 | 240.., ..] => true,
                // Shared (RFC 6598), protocols of the IETF, relays of 6to4, benchmarks (RFC 2544).
                [100, 64..128, ..] | [192, 0, 0, _] | [192, 88, 99, _] | [198, 18 | 19, ..] => true,
                _ => false,
            };
            !(is_reserved
                || address.is_private()
                || address.is_loopback()
                || address.is_link_local()
                || address.is_multicast()
                || address.is_documentation())
        }
        // Global unicast (RFC 4291) but for protocols of the IETF, as Teredo, for documentation (RFC
        // 3849, RFC 9637) and for 6to4. NAT64 is no part of it.
        IpAddr::V6(address) => match address.segments() {
            [0x2001, 0..0x200 | 0xdb8, ..] | [0x2002, ..] | [0x3fff, 0..0x1000, ..] => false,
            [first, ..] => first & 0xe000 == 0x2000,
        },
    }
}

#[cfg(test)]
mod tests;
