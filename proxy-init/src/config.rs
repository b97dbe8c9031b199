//! Command-line flags, parsed and validated by clap. The only file of this crate that reads the
//! environment.

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, value_parser};
use diy_mesh_model::ports::PortSet;
use diy_mesh_model::sidecar::OutboundUdp;

/// Search path for iptables when `PATH` is unset or empty: the image has no shell that sets one.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Configuration of one run.
#[derive(Debug, Clone, PartialEq, Eq, Parser)]
#[command(
    name = "proxy-init",
    version,
    about = "Redirects the TCP traffic of a network namespace to the proxy",
    long_about = "Redirects the IPv4 and IPv6 TCP traffic of its network namespace to the proxy, then exits.\n\n\
                  Loopback traffic, the proxy's own connections, the admin port, skipped ports and all protocols other than TCP are \
                  not redirected: UDP never passes the proxy. With --outbound-udp=dns, UDP that is neither DNS nor a reply is refused. Replaces the table diy-service-mesh of nftables in one transaction. Requires the capability NET_ADMIN, \
                  and with --iptables NET_RAW. Idempotent."
)]
pub struct Config {
    /// Proxy port that accepts inbound connections
    #[arg(long, value_name = "PORT", value_parser = value_parser!(u16).range(1..))]
    pub inbound_port: u16,
    /// Proxy port that accepts outbound connections
    #[arg(long, value_name = "PORT", value_parser = value_parser!(u16).range(1..))]
    pub outbound_port: u16,
    /// Proxy port for probes and metrics, never redirected
    #[arg(long, value_name = "PORT", value_parser = value_parser!(u16).range(1..))]
    pub admin_port: u16,
    /// UID of the proxy, whose connections are never redirected
    // u32::MAX is not a UID: the kernel uses it for "unchanged".
    #[arg(long, value_name = "UID", value_parser = value_parser!(u32).range(..i64::from(u32::MAX)))]
    pub proxy_uid: u32,
    /// Destination ports of inbound connections to skip, such as 25,9000-9100
    #[arg(
        long,
        value_name = "LIST",
        default_value_t,
        hide_default_value = true,
        allow_hyphen_values = true
    )]
    pub skip_inbound_ports: PortSet,
    /// Destination ports of outbound connections to skip, such as 3306,9000-9100
    #[arg(
        long,
        value_name = "LIST",
        default_value_t,
        hide_default_value = true,
        allow_hyphen_values = true
    )]
    pub skip_outbound_ports: PortSet,
    /// Outbound UDP: all, or dns: only DNS to the nameservers in /etc/resolv.conf, replies, loopback,
    /// and the proxy's own
    #[arg(long, value_name = "WHICH", default_value_t)]
    pub outbound_udp: OutboundUdp,
    /// Set the rules with the programs of iptables, for kernels without nf_tables; the image with the
    /// tag -iptables passes it
    #[arg(long)]
    pub iptables: bool,
    /// Print the rules of both address families and change nothing; requires no privileges
    #[arg(long)]
    pub dry_run: bool,
    /// Directories to search for the iptables programs, in the format of `PATH`.
    #[arg(skip = search_path())]
    pub search_path: OsString,
}

impl Config {
    /// Reads flags and environment. Exits the process on `--help`, `--version` and invalid flags
    /// (code 2).
    pub fn read() -> Self {
        Self::from_args(std::env::args_os()).unwrap_or_else(|error| error.exit())
    }

    fn from_args(
        args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> clap::error::Result<Self> {
        let config = Self::try_parse_from(args)?;
        let ports = [
            ("--inbound-port", config.inbound_port),
            ("--outbound-port", config.outbound_port),
            ("--admin-port", config.admin_port),
        ];
        for (index, (flag, port)) in ports.iter().enumerate() {
            if let Some((other, _)) = ports[..index].iter().find(|(_, taken)| taken == port) {
                return Err(Self::command().error(
                    ErrorKind::ValueValidation,
                    format!("{flag} and {other} have the same value {port}; the ports must differ"),
                ));
            }
        }
        Ok(config)
    }

    #[cfg(test)]
    pub(crate) fn example() -> Self {
        Self {
            inbound_port: 4000,
            outbound_port: 5000,
            admin_port: 4001,
            proxy_uid: 1337,
            skip_inbound_ports: "25,9000-9100".parse().expect("valid"),
            skip_outbound_ports: "3306".parse().expect("valid"),
            outbound_udp: OutboundUdp::All,
            iptables: false,
            dry_run: false,
            search_path: search_path(),
        }
    }
}

fn search_path() -> OsString {
    std::env::var_os("PATH")
        .filter(|path| !path.is_empty())
        .unwrap_or_else(|| DEFAULT_PATH.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &str) -> Result<Config, String> {
        let args = std::iter::once("proxy-init").chain(args.split_whitespace());
        Config::from_args(args).map_err(|error| error.to_string())
    }

    #[test]
    fn parses_all_flags() {
        let config = parse(
            "--inbound-port 4000 --outbound-port 5000 --admin-port 4001 --proxy-uid 1337 \
             --skip-inbound-ports 25,9000-9100 --skip-outbound-ports=3306",
        );
        assert_eq!(config, Ok(Config::example()));
    }

    #[test]
    fn reports_all_missing_flags() {
        let report = parse("--outbound-port 5000").expect_err("flags are missing");
        for flag in ["--inbound-port", "--admin-port", "--proxy-uid"] {
            assert!(report.contains(flag), "{flag}: {report}");
        }
    }

    #[test]
    fn rejects_invalid_values_and_names_the_flag() {
        for (flag, value, expected) in [
            ("--inbound-port", "0", "'0' for '--inbound-port"),
            ("--admin-port", "65536", "'65536' for '--admin-port"),
            ("--proxy-uid", "4294967295", "'4294967295' for '--proxy-uid"),
            ("--proxy-uid", "root", "'root' for '--proxy-uid"),
            ("--skip-inbound-ports", "5,x", "\"x\" is neither"),
            ("--skip-outbound-ports", "-1", "\"-1\" is neither"),
            ("--skip-outbound-ports", "9-3", "\"9-3\" is neither"),
            ("--outbound-udp", "none", "expected one of all, dns"),
        ] {
            let report = parse(&format!("{flag} {value}")).expect_err(value);
            assert!(
                report.contains(expected) && report.contains(flag),
                "{report}"
            );
        }
    }

    #[test]
    fn rejects_equal_ports() {
        let report = parse("--inbound-port 1 --outbound-port 4001 --admin-port 4001 --proxy-uid 4")
            .expect_err("two ports are equal");
        assert!(
            report.contains("--admin-port and --outbound-port have the same value 4001"),
            "{report}"
        );
    }
}
