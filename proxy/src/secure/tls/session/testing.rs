//! Access to the state of a session for its tests.

use super::*;

impl Session {
    /// Requires a key update after `records` further records.
    pub fn limit_records(&mut self, records: u64) {
        self.sealer.limit_records(records);
    }

    /// Simulates a key update request of the peer.
    pub fn request_key_update(&mut self) {
        self.key_update_requested = true;
    }

    /// The incomplete handshake message.
    pub fn message(&self) -> &[u8] {
        &self.message
    }

    /// Queues a record with any content.
    pub fn queue_record(&mut self, content_type: ContentType, plain: &[u8]) {
        let mut records = vec![0; plain.len() + 2 * OVERHEAD + 5];
        let length = self.seal(content_type, plain, &mut records).unwrap();
        self.outgoing.extend_from_slice(&records[..length]);
    }
}
