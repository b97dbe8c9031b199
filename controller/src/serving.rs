//! TLS between the listener and the gRPC server. Clients verify that the server is the controller.
//!
//! TLS 1.3 without client certificates: tokens authenticate the clients. The issuer of the mesh
//! signs the certificate, which is renewed while connections stay open. Unauthenticated clients
//! are limited in number, by address, and in time.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use diy_mesh_control_plane::clock::Clock;
use diy_mesh_control_plane::tls::{Client, Limits, OpenCall, TlsServer};
use diy_mesh_model::identity::{Identity, InvalidIdentity};
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::net::{TcpListener, TcpStream};
use tonic::Status;

use crate::authority::TrustReceiver;
use crate::issuer::{Issuer, SignError};
use crate::quota::{Charge, Counted, Quota, Quotas};

/// Connections in their handshake, or without an authenticated call.
const MAX_HANDSHAKES: usize = 1024;
/// Time without an open call after which a connection ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5 * 60);
/// Delay after a failure to sign the certificate.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Timers do not follow changes of the clock.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// The usual domain of cluster DNS. Proxies verify the identity instead of the DNS name.
const CLUSTER_DOMAIN: &str = "cluster.local";

/// The names in the serving certificate.
#[derive(Clone, Debug)]
pub struct Names {
    identity: Identity,
    dns: Vec<String>,
}

impl Names {
    /// The names of the controller in this trust domain and namespace.
    pub fn new(trust_domain: &str, namespace: &str) -> Result<Names, InvalidIdentity> {
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

/// The serving certificate and its renewal.
pub struct Serving {
    trust: TrustReceiver,
    names: Names,
    life: Duration,
    clock: Clock,
    current: RwLock<Current>,
}

struct Current {
    certified: Arc<CertifiedKey>,
    issuer: Arc<Issuer>,
    signed: SystemTime,
    renew: SystemTime,
}

impl Serving {
    /// Signs the first certificate.
    pub fn new(
        trust: TrustReceiver,
        names: Names,
        life: Duration,
        clock: Clock,
    ) -> Result<Arc<Serving>, SignError> {
        let issuer = trust.borrow().issuer.clone();
        Ok(Arc::new(Serving {
            current: RwLock::new(sign(issuer, &names, clock.now(), life)?),
            trust,
            names,
            life,
            clock,
        }))
    }

    /// Renews the certificate after two thirds of its validity, and when the issuer changes or the
    /// clock is set back.
    /// Returns when the authority ends.
    pub async fn renew(&self) {
        let mut trust = self.trust.clone();
        loop {
            let wait = match self.renew_if_due() {
                Ok(next) => next
                    .duration_since(self.clock.now())
                    .unwrap_or_default()
                    .min(CLOCK_CHECK_INTERVAL),
                Err(error) => {
                    tracing::error!("cannot renew the serving certificate, retrying: {error}");
                    RETRY_INTERVAL
                }
            };
            tokio::select! {
                changed = trust.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Returns the time of the next renewal.
    fn renew_if_due(&self) -> Result<SystemTime, SignError> {
        let issuer = self.trust.borrow().issuer.clone();
        {
            let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
            let used = current.signed..current.renew;
            if Arc::ptr_eq(&current.issuer, &issuer) && used.contains(&self.clock.now()) {
                return Ok(current.renew);
            }
        }
        let new = sign(issuer, &self.names, self.clock.now(), self.life)?;
        tracing::info!(issuer = new.issuer.id(), "serving certificate renewed");
        let renew = new.renew;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(renew)
    }

    /// The TLS configuration, which always uses the current certificate.
    pub fn tls(self: &Arc<Self>) -> Arc<ServerConfig> {
        let mut config =
            ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
                .with_protocol_versions(&[&rustls::version::TLS13])
                .expect("the provider supports TLS 1.3")
                .with_no_client_auth()
                .with_cert_resolver(Arc::new(Resolver(self.clone())));
        config.alpn_protocols = vec![b"h2".to_vec()];
        // Without resumption, clients verify the current certificate.
        config.send_tls13_tickets = 0;
        Arc::new(config)
    }
}

struct Resolver(Arc<Serving>);

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let current = self.0.current.read();
        let current = current.unwrap_or_else(PoisonError::into_inner);
        Some(current.certified.clone())
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Resolver")
    }
}

fn sign(
    issuer: Arc<Issuer>,
    names: &Names,
    now: SystemTime,
    life: Duration,
) -> Result<Current, SignError> {
    let local = [
        IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::LOCALHOST),
    ];
    let identity = Some(names.identity.as_str());
    let signed = issuer.sign_serving(identity, &names.dns, &local, now, life)?;
    let key = aws_lc_rs::sign::any_supported_type(&signed.key)
        .map_err(|error| SignError::Crypto(error.to_string()))?;
    let left = signed.not_after.duration_since(now).unwrap_or_default();
    Ok(Current {
        certified: Arc::new(CertifiedKey::new(signed.chain, key)),
        issuer,
        signed: now,
        renew: now + left * 2 / 3,
    })
}

/// Accepts connections and completes their handshakes.
pub fn server(tls: Arc<ServerConfig>, listener: TcpListener, quotas: &Quotas) -> TlsServer {
    let limits = Limits {
        handshakes: MAX_HANDSHAKES,
        idle: IDLE_TIMEOUT,
    };
    TlsServer::new(listener, tls, quotas.connections().clone(), limits)
}

/// The client of a connection.
#[derive(Clone)]
pub struct Peer {
    /// Its address. `None`: it has disconnected.
    pub address: Option<SocketAddr>,
    client: Arc<Client>,
    /// The place of the connection in the quota of the caller that it authenticated first.
    counted: Arc<OnceLock<Counted>>,
}

impl Peer {
    /// The client of this connection.
    pub fn new(stream: &TcpStream, client: Arc<Client>) -> Peer {
        Peer {
            address: stream.peer_addr().ok(),
            client,
            counted: Arc::default(),
        }
    }

    /// Serves the connection. Returns `None` if another connection takes its slot before it ends.
    pub async fn run<T>(&self, work: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        self.client.run(work).await
    }

    /// Completes when the connection must end.
    pub async fn expired(&self) {
        self.client.expired().await;
    }

    /// Its IP address.
    pub fn ip(&self) -> Option<IpAddr> {
        self.address.map(|address| address.ip().to_canonical())
    }

    /// Counts a call until the value is dropped.
    pub fn call(&self) -> OpenCall {
        self.client.call()
    }

    /// The charge of a call to the connection: nothing yet.
    pub fn charge(&self) -> Charge {
        Charge::new(self.client.slot().clone())
    }

    /// A caller with this quota has authenticated.
    pub fn authenticate(&self, quota: &Arc<Quota>) -> Result<(), Status> {
        if self.counted.get().is_none() {
            // At most one of several concurrent calls keeps its permit.
            let _ = self.counted.set(quota.connection()?);
            let (namespace, pod) = quota.holder().clone();
            self.client.authenticate(namespace, pod);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::watch;

    use super::*;
    use crate::authority::{Roots, Trust, self_signed};
    use diy_mesh_testkit::wait::{soon, until};

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
        serving.current.read().unwrap().certified.cert[0].to_vec()
    }

    fn serving(life: u64) -> (Arc<Serving>, watch::Sender<Arc<Trust>>) {
        let authority = watch::Sender::new(Arc::new(trust()));
        let names = Names::new("cluster.local", "service-mesh").unwrap();
        let life = Duration::from_secs(life);
        let serving = Serving::new(authority.subscribe(), names, life, Clock::default()).unwrap();
        (serving, authority)
    }

    #[test]
    fn renews_certificate_when_it_is_due_or_the_issuer_or_the_clock_changes() {
        let (serving, authority) = serving(3000);
        let first = leaf(&serving);
        let due = serving.renew_if_due().unwrap();
        let due = due.duration_since(SystemTime::now()).unwrap();
        assert!(
            (1990..=2000).contains(&due.as_secs()),
            "after two thirds of its validity: {due:?}"
        );
        assert_eq!(leaf(&serving), first);
        serving.current.write().unwrap().renew = SystemTime::now();
        serving.renew_if_due().unwrap();
        let second = leaf(&serving);
        assert_ne!(second, first);
        // The clock is an hour behind the time of the signature.
        serving.current.write().unwrap().signed += Duration::from_secs(3600);
        serving.renew_if_due().unwrap();
        let back = leaf(&serving);
        assert_ne!(back, second);
        authority.send_replace(Arc::new(trust()));
        serving.renew_if_due().unwrap();
        assert_ne!(leaf(&serving), back);
        assert!(Arc::ptr_eq(
            &serving.current.read().unwrap().issuer,
            &authority.borrow().issuer
        ));
    }

    #[tokio::test]
    async fn renews_due_certificate_by_itself() {
        let (serving, _authority) = serving(1);
        let first = leaf(&serving);
        tokio::select! {
            () = serving.renew() => {}
            () = soon(until(|| leaf(&serving) != first)) => {}
        }
    }
}
