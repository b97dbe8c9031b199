//! The inbound path: from a connection that came to the pod, to the pod's app, one step a line.

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
    // 2. Where was it going? The app is reached there: at the pod's own address, not at 127.0.0.1.
    let original = match original_destination(&stream, &worker.own_ports()) {
        Ok(original) => original,
        Err(refused) => return worker.refuse(Direction::Inbound, peer, &refused),
    };
    let destination = worker.apps.fixed(original);
    let flow = Flow {
        worker,
        direction: Direction::Inbound,
        peer,
        destination,
        caller: Caller::Unproven,
    };
    // 3. to 8. Detect, find out who calls, connect, copy or serve.
    serve(Io::new(stream), flow).await;
}
