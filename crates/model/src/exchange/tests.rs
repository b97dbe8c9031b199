//! The text of exchanges.

use super::*;

#[test]
fn first_line_names_the_connection() {
    for (direction, expected) in [
        (
            "inbound",
            "Inbound connection from 10.244.0.7:40000 to port: 8080",
        ),
        ("outbound", "Outbound connection to 10.244.0.6:8080"),
    ] {
        let exchange: Exchange = serde_json::from_value(serde_json::json!({
            "time": "2026-11-24T10:00:00Z", "direction": direction, "protocol": "tcp",
            "peer": "10.244.0.7:40000", "destination": "10.244.0.6:8080",
            "duration_ms": 1.0, "sent": 12, "received": 80,
        }))
        .expect("an exchange");
        assert_eq!(exchange.text().lines().next(), Some(expected));
    }
}
