//! The outbound path: from a connection of the pod's app, to an endpoint of where it was going, one step a line.

use std::net::SocketAddr;
use std::rc::Rc;

use tokio::net::TcpStream;

use crate::dump::Direction;
use crate::io::Io;
use crate::orig_dst::original_destination;
use crate::policy::Caller;
use crate::serve::serve;
use crate::worker::{Flow, Worker};

/// Carries one accepted connection (step 1) until it ends.
pub async fn carry(stream: TcpStream, peer: SocketAddr, worker: Rc<Worker>) {
    // 2. Where was it going, and what does discovery know of that? What it does not know passes through.
    let original = match original_destination(&stream, &worker.own_ports()) {
        Ok(original) => original,
        Err(refused) => return worker.refuse(Direction::Outbound, peer, &refused),
    };
    let destination = worker.destinations.get_or_watch(original).await;
    let flow = Flow {
        worker,
        direction: Direction::Outbound,
        peer,
        destination,
        caller: Caller::App,
    };
    // 3. to 8. Detect, route, balance, connect, copy or serve.
    serve(Io::new(stream), flow).await;
}
