//! The interfaces of the network namespace of this process: whether its IPv6 traffic can leave the
//! pod, and therefore must be redirected.

/// Whether an interface has a global IPv6 address.
pub fn has_global_ipv6_address() -> bool {
    // The file does not exist if the kernel has no IPv6.
    std::fs::read_to_string("/proc/self/net/if_inet6")
        .is_ok_and(|table| lists_global_address(&table))
}

/// Whether `/proc/self/net/if_inet6` contains a global address. Columns: address, interface, prefix
/// length, scope, flags, name; scope 00 is global.
fn lists_global_address(table: &str) -> bool {
    table
        .lines()
        .any(|line| line.split_whitespace().nth(3) == Some("00"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_global_addresses_match() {
        let link = "fe800000000000000000000000000001 02 40 20 80     eth0\n";
        let loopback = "00000000000000000000000000000001 01 80 10 80       lo\n";
        let global = "fd000000000000000000000000000001 02 40 00 80     eth0\n";
        assert!(!lists_global_address(&format!("{loopback}{link}")));
        assert!(lists_global_address(&format!("{loopback}{global}{link}")));
        assert!(!lists_global_address(""));
    }
}
