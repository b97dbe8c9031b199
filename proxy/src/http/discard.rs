//! The rest of a response in whose place another attempt follows. It is read and dropped beside that
//! attempt: then the connection can carry another exchange, and an overloaded endpoint is spared
//! another handshake.

use std::time::Duration;

use tokio::task::spawn_local;
use tokio::time::timeout;

use crate::limits::memory::Charge;

/// The maximum number of bytes of one body that are read.
pub const MAX_DISCARD: usize = 64 * 1024;
/// How long they are read.
const DISCARD_TIMEOUT: Duration = Duration::from_millis(100);

/// Reads in the background, within the time. `memory` is charged for what it holds.
pub fn in_background(memory: Charge, read: impl Future<Output = ()> + 'static) {
    spawn_local(async move {
        // Dropped at the end, the connection or the stream is reset.
        let _ = timeout(DISCARD_TIMEOUT, read).await;
        drop(memory);
    });
}
