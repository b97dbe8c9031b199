//! Redirect rules of one network namespace: flags ([`config`]) become rules ([`rules`]), which
//! [`nftables`] loads, or [`iptables`] where the kernel has no nf_tables.
//!
//! Inbound TCP is redirected to the proxy's inbound port, outbound TCP to its outbound port, for
//! IPv4 and IPv6. UDP and other protocols are not redirected. Outbound UDP can be restricted to
//! DNS: to the [`resolvers`] of the pod. A run is idempotent. nftables takes all rules in one
//! transaction, iptables one table of one address family. The program exits after that; it uses
//! neither the network nor the Kubernetes API.

pub mod config;
pub mod iptables;
pub mod nftables;
pub mod resolvers;
pub mod rules;

use std::fmt::Write;
use std::net::IpAddr;

use diy_mesh_model::interfaces::has_global_ipv6_address;
use diy_mesh_model::ports::PortSet;
use diy_mesh_model::sidecar::OutboundUdp;
use thiserror::Error;

use crate::config::Config;
use crate::iptables::{Family, Rules, programs};
use crate::rules::Chain;

/// Error of a run.
#[derive(Debug, Error)]
pub enum Error {
    /// The resolvers, to which UDP is to be restricted, are unknown.
    #[error(
        "cannot restrict outbound UDP to DNS: {0}; correct dnsConfig of the pod or the resolv.conf of its node, \
         or set the annotation diy-service-mesh/outbound-udp to all"
    )]
    Resolvers(#[from] resolvers::Error),
    /// The table of nftables could not be loaded.
    #[error("cannot set the redirect rules: {0}")]
    Nftables(#[from] nftables::Error),
    /// The IPv4 rules of iptables could not be loaded.
    #[error("cannot set the IPv4 rules: {0}")]
    Ipv4(programs::Error),
    /// The IPv6 rules of iptables could not be loaded, and the pod has an IPv6 address.
    #[error(
        "cannot set the IPv6 rules: {0}; this pod has an IPv6 address whose traffic would bypass the proxy: \
         provide the nat table of ip6tables on the node, or remove the pod's IPv6 address"
    )]
    Ipv6(programs::Error),
}

/// Sets the rules, or only prints them on a dry run, and returns the report for standard output.
pub fn run(config: &Config) -> Result<String, Error> {
    let resolvers = match config.outbound_udp {
        OutboundUdp::All => None,
        OutboundUdp::Dns => Some(resolvers::read()?),
    };
    let resolvers = resolvers.as_deref();
    let chains = rules::chains(config, resolvers);
    let result = match (config.iptables, config.dry_run) {
        (false, true) => return Ok(nftables::text(&chains)),
        (true, true) => return Ok(iptables_text(&chains)),
        (false, false) => {
            nftables::apply(&chains)?;
            "IPv4 and IPv6: set by nftables\n".to_owned()
        }
        (true, false) => set_by_iptables(config, &chains)?,
    };
    Ok(summary(config, resolvers) + &result)
}

fn set_by_iptables(config: &Config, chains: &[Chain]) -> Result<String, Error> {
    let set = |family| programs::apply(&Rules::new(chains, family), &config.search_path);
    let ipv4 = set(Family::V4).map_err(Error::Ipv4)?;
    let ipv6 = match set(Family::V6) {
        Ok(backend) => format!("IPv6: set by {backend}"),
        Err(error) if has_global_ipv6_address() => return Err(Error::Ipv6(error)),
        Err(error) => format!("IPv6: skipped, this pod has no IPv6 address: {error}"),
    };
    Ok(format!("IPv4: set by {ipv4}\n{ipv6}\n"))
}

/// Input of iptables-restore for a namespace without rules, for both address families.
fn iptables_text(chains: &[Chain]) -> String {
    let mut text = String::new();
    for family in [Family::V4, Family::V6] {
        let input = Rules::new(chains, family).restore_input("");
        writeln!(
            text,
            "# {family}, for {}-restore --noflush",
            family.program()
        )
        .expect("writing to a String never fails");
        text.push_str(input.text());
    }
    text
}

fn summary(config: &Config, resolvers: Option<&[IpAddr]>) -> String {
    let Config {
        inbound_port,
        outbound_port,
        admin_port,
        proxy_uid,
        skip_inbound_ports,
        skip_outbound_ports,
        ..
    } = config;
    let skipped = |ports: &PortSet| {
        if ports.is_empty() {
            String::new()
        } else {
            format!(", ports {ports}")
        }
    };
    let udp = resolvers.map(|resolvers| {
        format!(
            "outbound UDP is refused, except: loopback, replies, the proxy's own (uid {proxy_uid}), \
             DNS to the nameservers {resolvers:?}\n"
        )
    });
    format!(
        "inbound TCP goes to port {inbound_port}, except: loopback, the admin port {admin_port}{}\n\
         outbound TCP goes to port {outbound_port}, except: loopback, the proxy's own (uid {proxy_uid}){}\n{}",
        skipped(skip_inbound_ports),
        skipped(skip_outbound_ports),
        udp.unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_lists_redirects_and_exceptions() {
        let tcp = "inbound TCP goes to port 4000, except: loopback, the admin port 4001, ports 25,9000-9100\n\
             outbound TCP goes to port 5000, except: loopback, the proxy's own (uid 1337), ports 3306\n";
        assert_eq!(summary(&Config::example(), None), tcp);
        let resolvers = ["10.96.0.10", "fd00::a"].map(|address| address.parse().expect("valid"));
        let udp = "outbound UDP is refused, except: loopback, replies, the proxy's own (uid 1337), DNS to the nameservers ";
        assert_eq!(
            summary(&Config::example(), Some(&resolvers)),
            format!("{tcp}{udp}[10.96.0.10, fd00::a]\n")
        );
        assert_eq!(
            summary(&Config::example(), Some(&[])),
            format!("{tcp}{udp}[]\n")
        );
    }
}
