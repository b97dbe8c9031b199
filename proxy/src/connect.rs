//! Step 7: a new connection to an endpoint, within the time that `forward.rs` gives an attempt. It
//! distinguishes a refused connection from a timeout. `forward.rs` selects the next endpoint.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::Identity;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use crate::discovery::EndpointInfo;
use crate::error::Failure;
use crate::io::Io;
use crate::tls::{Alpn, Tls};

/// The far end of connections that can replace one another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Remote {
    /// Its address.
    pub address: SocketAddr,
    /// Its pod as "namespace/name": another pod may get the address later. Empty if it is none.
    pub pod: String,
    /// The SPIFFE ID that it has to prove. None: it is not meshed.
    pub identity: Option<Identity>,
}

impl From<&EndpointInfo> for Remote {
    fn from(info: &EndpointInfo) -> Self {
        Self {
            address: info.address,
            pod: info.pod.clone(),
            identity: info.identity.clone(),
        }
    }
}

/// Opens the new connections of one attempt.
#[derive(Clone, Copy)]
pub struct Dialer<'a> {
    /// The TLS configurations.
    pub tls: &'a Tls,
    /// How long a connection may take, its TLS handshake included.
    pub timeout: Duration,
}

impl Dialer<'_> {
    /// Opens a connection: with mutual TLS if the remote is meshed, never in plaintext then.
    pub async fn dial(&self, remote: &Remote, alpn: Alpn) -> Result<Io, Failure> {
        let Self { tls, timeout } = *self;
        let (address, deadline) = (remote.address, Instant::now() + timeout);
        let io = connect(address, tls.timeouts().tcp_user, deadline).await?;
        match &remote.identity {
            // A connection to the pod itself never leaves it, and does not pass its own proxy again.
            Some(expected) if !is_own(&io) => {
                let secured = timeout_at(deadline, tls.connect(io, address, expected, alpn));
                secured.await.unwrap_or_else(|_| {
                    let reason = format!("not completed within {timeout:?}");
                    Err(Failure::Handshake { address, reason })
                })
            }
            _ => Ok(io),
        }
    }
}

/// The kernel connects from the address that it connects to only where that address is this pod's.
fn is_own(io: &Io) -> bool {
    let socket = io.socket();
    matches!((socket.local_addr(), socket.peer_addr()), (Ok(local), Ok(peer)) if local.ip() == peer.ip())
}

async fn connect(
    address: SocketAddr,
    user_timeout: Duration,
    deadline: Instant,
) -> Result<Io, Failure> {
    let stream = match timeout_at(deadline, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) if error.kind() == io::ErrorKind::TimedOut => {
            return Err(Failure::ConnectTimeout(address));
        }
        Ok(Err(source)) => {
            return Err(Failure::Connect {
                address,
                source: Arc::new(source),
            });
        }
        Err(_) => return Err(Failure::ConnectTimeout(address)),
    };
    // A socket whose peer has gone already refuses options; the first read will tell.
    let _ = set_options(SockRef::from(&stream), user_timeout);
    Ok(Io::new(stream))
}

/// Sets the options of each socket, accepted or dialed. A peer that is unreachable is detected on a
/// quiet connection by keepalive probes, and on a connection with unacknowledged data by
/// `TCP_USER_TIMEOUT`, by default within two minutes both. With a `user_timeout`, Linux also ends
/// the probes after it, not after a number of them.
pub fn set_options(socket: SockRef<'_>, user_timeout: Duration) -> io::Result<()> {
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(15))
        .with_retries(4);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&keepalive)?;
    // 0 is the default of the kernel.
    socket.set_tcp_user_timeout(Some(user_timeout))
}
