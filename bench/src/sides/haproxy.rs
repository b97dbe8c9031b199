//! HAProxy, with one thread: Debian's package.

use super::peer::Peer;
use crate::config::Programs;

/// The configured HAProxy.
pub(super) fn peer(programs: &Programs) -> Peer {
    Peer {
        name: "haproxy",
        program: programs.haproxy.clone(),
        client: include_str!("haproxy-client.cfg"),
        server: include_str!("haproxy-server.cfg"),
        arguments: &["-db", "-f"],
    }
}
