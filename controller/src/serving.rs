//! TLS before gRPC: who connects finds out that this is the controller. Between the listener and
//! the gRPC server.
//!
//! TLS 1.3 alone, without client certificates: callers prove themselves by tokens. The certificate
//! comes from the mesh's own issuer and is replaced while connections go on. Handshakes run beside
//! each other, bounded in number and time, and never hold up the next; a connection that is no TLS
//! is closed, never served.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};
use std::{fmt, io};

use diy_mesh_proto::Identity;
use diy_mesh_runtime::listen::Acceptor;
use futures::Stream;
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::authority::Authority;
use crate::issuer::{Issuer, SignError};

/// How many connections there may be: a proxy has one or two.
const MAX_CONNECTIONS: usize = 50_000;
/// How many of them may be in their handshake.
const MAX_HANDSHAKES: usize = 1024;
/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// After a certificate could not be made.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// The clock is looked at so often: it may jump, a timer does not.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// The names of the controller, for its certificate.
#[derive(Clone, Debug)]
pub struct Names {
    identity: Identity,
    dns: Vec<String>,
}

impl Names {
    /// Those of the controller in this trust domain and namespace.
    pub fn new(
        trust_domain: &str,
        namespace: &str,
    ) -> Result<Names, diy_mesh_proto::identity::InvalidIdentity> {
        let name = format!("controller.{namespace}");
        let dns = vec![
            format!("{name}.svc.{CLUSTER_DOMAIN}"),
            format!("{name}.svc"),
            name,
            "localhost".to_owned(),
        ];
        Ok(Names {
            identity: Identity::new(trust_domain, namespace, "controller")?,
            dns,
        })
    }
}

/// What cluster DNS calls itself nearly everywhere. Proxies verify the identity, not this.
const CLUSTER_DOMAIN: &str = "cluster.local";

/// The certificate that is shown, replaced in time.
pub struct Serving {
    authority: Authority,
    names: Names,
    life: Duration,
    shown: RwLock<Shown>,
}

struct Shown {
    certified: Arc<CertifiedKey>,
    issuer: Arc<Issuer>,
    renew: SystemTime,
}

impl Serving {
    /// Has the first certificate made.
    pub fn new(
        authority: Authority,
        names: Names,
        life: Duration,
    ) -> Result<Arc<Serving>, SignError> {
        let shown = RwLock::new(make(&authority, &names, life)?);
        Ok(Arc::new(Serving {
            authority,
            names,
            life,
            shown,
        }))
    }

    /// Has a new certificate made at two thirds of the life of each, and when another issuer signs.
    /// Ends with the authority.
    pub async fn renew(&self) {
        let mut trust = self.authority.trust();
        loop {
            let wait = match self.renew_where_due() {
                Ok(next) => next
                    .duration_since(SystemTime::now())
                    .unwrap_or_default()
                    .min(CLOCK_CHECK_INTERVAL),
                Err(error) => {
                    tracing::error!(
                        "the controller's own certificate cannot be renewed, the former one is shown: {error}"
                    );
                    RETRY_INTERVAL
                }
            };
            tokio::select! {
                changed = trust.changed() => changed.expect("self holds the authority"),
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// When it is due next.
    fn renew_where_due(&self) -> Result<SystemTime, SignError> {
        let issuer = self.authority.trust().borrow().issuer.clone();
        {
            let shown = self.shown.read().unwrap_or_else(PoisonError::into_inner);
            if Arc::ptr_eq(&shown.issuer, &issuer) && SystemTime::now() < shown.renew {
                return Ok(shown.renew);
            }
        }
        let new = make(&self.authority, &self.names, self.life)?;
        tracing::info!(
            issuer = new.issuer.id(),
            "the controller's own certificate is new"
        );
        let renew = new.renew;
        *self.shown.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(renew)
    }

    /// What TLS is spoken by.
    pub fn tls(self: &Arc<Self>) -> Arc<ServerConfig> {
        let mut config =
            ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
                .with_protocol_versions(&[&rustls::version::TLS13])
                .expect("the provider speaks TLS 1.3")
                .with_no_client_auth()
                .with_cert_resolver(Arc::new(Resolver(self.clone())));
        config.alpn_protocols = vec![b"h2".to_vec()];
        // Whoever comes back verifies the certificate that is shown then.
        config.send_tls13_tickets = 0;
        Arc::new(config)
    }
}

struct Resolver(Arc<Serving>);

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(
            self.0
                .shown
                .read()
                .unwrap_or_else(PoisonError::into_inner)
                .certified
                .clone(),
        )
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Resolver")
    }
}

fn make(authority: &Authority, names: &Names, life: Duration) -> Result<Shown, SignError> {
    let issuer = authority.trust().borrow().issuer.clone();
    let now = SystemTime::now();
    let local = [
        IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::LOCALHOST),
    ];
    let made = issuer.sign_serving(Some(names.identity.as_str()), &names.dns, &local, now, life)?;
    let key = aws_lc_rs::sign::any_supported_type(&made.key)
        .map_err(|error| SignError::Crypto(error.to_string()))?;
    let left = made.not_after.duration_since(now).unwrap_or_default();
    Ok(Shown {
        certified: Arc::new(CertifiedKey::new(made.chain, key)),
        issuer,
        renew: now + left * 2 / 3,
    })
}

/// The connections with a completed handshake.
pub fn handshakes(
    tls: Arc<ServerConfig>,
    listener: TcpListener,
) -> impl Stream<Item = io::Result<TlsConnection>> {
    let (done, secured) = mpsc::channel(16);
    tokio::spawn(accept(
        TlsAcceptor::from(tls),
        Acceptor::new(listener),
        done,
    ));
    ReceiverStream::new(secured)
}

async fn accept(
    tls: TlsAcceptor,
    mut acceptor: Acceptor,
    done: mpsc::Sender<io::Result<TlsConnection>>,
) {
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    loop {
        let (connection, handshake) = tokio::select! {
            () = done.closed() => return,
            accepted = acceptor.accept_limited(&handshakes) => accepted,
        };
        // A closed connection makes the proxy try another replica; one that waits does not.
        let Ok(slot) = connections.clone().try_acquire_owned() else {
            tracing::warn!(
                "connection closed: the limit of {MAX_CONNECTIONS} connections is reached"
            );
            continue;
        };
        let (tls, done) = (tls.clone(), done.clone());
        tokio::spawn(async move {
            let _handshake = handshake;
            if let Some(connection) = handshake_with_timeout(tls, connection, slot).await {
                // Fails only while the server shuts down.
                let _ = done.send(Ok(connection)).await;
            }
        });
    }
}

async fn handshake_with_timeout(
    tls: TlsAcceptor,
    connection: TcpStream,
    place: OwnedSemaphorePermit,
) -> Option<TlsConnection> {
    let peer = connection.peer_addr().ok();
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(connection)).await {
        Ok(Ok(stream)) => {
            return Some(TlsConnection {
                stream,
                _place: place,
            });
        }
        // Every TCP health check ends so.
        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {}
        Ok(Err(error)) => tracing::debug!(?peer, "a TLS handshake failed: {error}"),
        Err(_) => tracing::debug!(
            ?peer,
            "a TLS handshake took longer than {} s",
            HANDSHAKE_TIMEOUT.as_secs()
        ),
    }
    None
}

/// A connection over TLS, which counts until it is dropped.
pub struct TlsConnection {
    stream: TlsStream<TcpStream>,
    _place: OwnedSemaphorePermit,
}

impl Connected for TlsConnection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.get_ref().0.connect_info()
    }
}

impl AsyncRead for TlsConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for TlsConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authority::{Roots, Trust, self_signed};

    fn trust() -> Trust {
        let now = SystemTime::now();
        let (certificate, key) =
            self_signed("cluster.local", now, Duration::from_secs(3600)).unwrap();
        let issuer = Issuer::from_pem(&certificate, &key, now).unwrap().into();
        Trust {
            issuer,
            roots: Roots::from_pem(&certificate).unwrap().into(),
            renew_within: Duration::ZERO,
        }
    }

    fn leaf(serving: &Serving) -> Vec<u8> {
        serving.shown.read().unwrap().certified.cert[0].to_vec()
    }

    #[test]
    fn a_certificate_is_kept_until_it_is_due_or_another_issuer_signs() {
        let (authority, names) = (
            Authority::fixed(trust()),
            Names::new("cluster.local", "service-mesh").unwrap(),
        );
        let serving = Serving::new(authority.clone(), names, Duration::from_secs(3000)).unwrap();
        let first = leaf(&serving);
        let due = serving
            .renew_where_due()
            .unwrap()
            .duration_since(SystemTime::now())
            .unwrap();
        assert!(
            (1990..=2000).contains(&due.as_secs()),
            "at two thirds of its life: {due:?}"
        );
        assert_eq!(leaf(&serving), first);
        serving.shown.write().unwrap().renew = SystemTime::now();
        serving.renew_where_due().unwrap();
        let second = leaf(&serving);
        assert_ne!(second, first);
        authority.publish(trust());
        serving.renew_where_due().unwrap();
        assert_ne!(leaf(&serving), second);
        assert!(Arc::ptr_eq(
            &serving.shown.read().unwrap().issuer,
            &authority.trust().borrow().issuer
        ));
    }

    #[tokio::test]
    async fn what_is_due_is_renewed_without_anybody_asking() {
        let (authority, names) = (
            Authority::fixed(trust()),
            Names::new("cluster.local", "service-mesh").unwrap(),
        );
        let serving = Serving::new(authority, names, Duration::from_secs(1)).unwrap();
        let first = leaf(&serving);
        let changed = async {
            while leaf(&serving) == first {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = serving.renew() => {}
            changed = tokio::time::timeout(Duration::from_secs(20), changed) => changed.expect("it is renewed"),
        }
    }
}
