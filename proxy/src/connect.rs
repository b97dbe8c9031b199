//! Step 7: from an endpoint to a connection, out of its pool or new. It knows the time that a dial may take and tells
//! refusals from silence; whom to try next is the caller's to say.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::balance::Endpoint;
use crate::error::Failure;
use crate::io::Io;
use crate::tls::{Alpn, Tls};

/// How long the kernel may take to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// An HTTP/1 connection that no exchange uses.
pub struct Upstream {
    /// The connection.
    pub io: Io,
    /// It has carried an exchange before, so that it may have died meanwhile.
    pub reused: bool,
}

/// An HTTP/1 connection to the endpoint: a pooled one where there is one, and pooled ones will do.
pub async fn http1(
    endpoint: &Rc<Endpoint>,
    pooled: bool,
    tls: &Tls,
    now: Instant,
) -> Result<Upstream, Failure> {
    match pooled.then(|| endpoint.pool.checkout_http1(now)).flatten() {
        Some(io) => Ok(Upstream { io, reused: true }),
        None => Ok(Upstream {
            io: dial(endpoint, Alpn::Http1, tls).await?,
            reused: false,
        }),
    }
}

/// A new connection: mutual TLS where the endpoint is meshed, and never anything else then.
pub async fn dial(endpoint: &Endpoint, alpn: Alpn, tls: &Tls) -> Result<Io, Failure> {
    let io = connect(endpoint.address).await?;
    match &endpoint.identity {
        // What goes to the pod itself never leaves it, and does not pass its own proxy again.
        Some(expected) if !is_own(&io) => tls.connect(io, endpoint.address, expected, alpn).await,
        _ => Ok(io),
    }
}

/// The kernel connects from the address that it connects to only where that address is this pod's.
fn is_own(io: &Io) -> bool {
    let socket = io.socket();
    matches!((socket.local_addr(), socket.peer_addr()), (Ok(local), Ok(peer)) if local.ip() == peer.ip())
}

async fn connect(address: SocketAddr) -> Result<Io, Failure> {
    let stream = match timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) if error.kind() == io::ErrorKind::TimedOut => {
            return Err(Failure::ConnectTimeout(address));
        }
        Ok(Err(source)) => return Err(Failure::Connect { address, source }),
        Err(_) => return Err(Failure::ConnectTimeout(address)),
    };
    // A socket whose peer has gone already refuses options; the first read will tell.
    let _ = stream.set_nodelay(true);
    let _ = SockRef::from(&stream).set_tcp_keepalive(&keepalive());
    Ok(Io::new(stream))
}

/// How soon a peer that is gone without a word is noticed on a quiet connection: within about two minutes.
pub fn keepalive() -> TcpKeepalive {
    TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(15))
        .with_retries(4)
}
