//! UDP of the pod, which the mesh does not carry, as the kernel counts it.

/// The values of the label `way`, in the order of [`datagrams`].
pub const WAYS: [&str; 3] = ["received", "sent", "error"];

/// The datagrams of the pod since its start. `None` where the kernel does not report them.
pub fn read() -> Option<[u64; WAYS.len()]> {
    let v4 = std::fs::read_to_string("/proc/net/snmp").ok()?;
    // Absent without IPv6.
    let v6 = std::fs::read_to_string("/proc/net/snmp6").unwrap_or_default();
    Some(datagrams(&v4, &v6))
}

/// Those that were received and sent, and those that could not be, of both versions of IP.
fn datagrams(v4: &str, v6: &str) -> [u64; WAYS.len()] {
    // A line of names, then one of values.
    let mut lines = v4.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (lines.next(), lines.next());
    let [names, values] = [names, values].map(|line| line.unwrap_or_default().split(' '));
    let v4 = |name| names.clone().zip(values.clone()).find(|one| one.0 == name);
    let v6 = |name| {
        let of_udp = v6.lines().filter_map(|line| line.strip_prefix("Udp6"));
        let mut values = of_udp.filter_map(|line| line.strip_prefix(name));
        values.next()
    };
    let number = |text: &str| text.trim().parse::<u64>().unwrap_or(0);
    let sum = |name| {
        let v4 = v4(name).map_or(0, |(_, value)| number(value));
        v4.saturating_add(v6(name).map_or(0, number))
    };
    let errors = sum("InErrors").saturating_add(sum("SndbufErrors"));
    [sum("InDatagrams"), sum("OutDatagrams"), errors]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_datagrams_of_both_versions_of_ip() {
        let v4 = "Ip: Forwarding InReceives\nIp: 1 99\n\
                  Udp: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors SndbufErrors\n\
                  Udp: 10 1 2 20 2 3\nUdpLite: InDatagrams\nUdpLite: 5\n";
        let v6 = "Ip6InReceives   \t7\nUdp6InDatagrams                 \t100\nUdp6OutDatagrams\t200\n\
                  Udp6InErrors \t300\nUdp6SndbufErrors \tx\nUdpLite6InDatagrams\t9\n";
        assert_eq!(datagrams(v4, v6), [110, 220, 305]);
        assert_eq!(datagrams(v4, ""), [10, 20, 5]);
        assert_eq!(datagrams("", "nonsense"), [0; 3]);
        assert!(read().is_some());
    }
}
