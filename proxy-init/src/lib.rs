//! The redirect rules of one network namespace: options ([`config`]) become rules ([`rules`]), which are applied ([`apply`]).
//!
//! TCP that reaches the pod goes to the proxy's inbound port, TCP that leaves it to the outbound port, IPv4 and IPv6. UDP and everything
//! else is left alone: nothing of it passes the proxy. A run gives the same rules however often it is repeated, each family's in one step:
//! there is no moment with half of them. Nothing here stays running, and nothing speaks to the network or to Kubernetes.

pub mod apply;
pub mod config;
pub mod ports;
pub mod rules;

use std::fmt::Write;

use thiserror::Error;

use crate::apply::Failure;
use crate::config::Config;
use crate::rules::{Family, Rules};

/// Why the rules are not as they should be.
#[derive(Debug, Error)]
pub enum Error {
    /// Without IPv4's rules there is no mesh.
    #[error("the IPv4 rules are not set: {0}")]
    V4(Failure),
    /// IPv6 is in use here, so traffic would pass by the mesh.
    #[error(
        "the IPv6 rules are not set: {0}; this pod has an IPv6 address, and its traffic would pass by the proxy: \
         make ip6tables with its nat table available on the node, or give the pod no IPv6 address"
    )]
    V6(Failure),
}

/// Sets the rules, or only shows them, and gives the report for the reader.
pub fn run(config: &Config) -> Result<String, Error> {
    if config.dry_run {
        return Ok(dry_run(config));
    }
    let backend4 =
        apply::apply(&Rules::new(config, Family::V4), &config.search_path).map_err(Error::V4)?;
    let backend6 = match apply::apply(&Rules::new(config, Family::V6), &config.search_path) {
        Ok(backend) => format!("IPv6: set by {backend}"),
        Err(failure) if apply::has_ipv6_address() => return Err(Error::V6(failure)),
        Err(failure) => {
            format!("IPv6: not set, and not needed, as this pod has no IPv6 address: {failure}")
        }
    };
    Ok(format!(
        "{}IPv4: set by {backend4}\n{backend6}\n",
        summary(config)
    ))
}

/// What a fresh namespace would get, as iptables-restore reads it.
fn dry_run(config: &Config) -> String {
    let mut text = String::new();
    for family in [Family::V4, Family::V6] {
        let load = Rules::new(config, family).load("");
        writeln!(
            text,
            "# {family}, for {}-restore --noflush",
            family.program()
        )
        .expect("a String takes every write");
        text.push_str(load.text());
    }
    text
}

fn summary(config: &Config) -> String {
    let Config {
        inbound_port,
        outbound_port,
        admin_port,
        proxy_uid,
        skip_inbound_ports,
        skip_outbound_ports,
        ..
    } = config;
    let skipped = |ports: &ports::Ports| {
        if ports.is_empty() {
            String::new()
        } else {
            format!(", ports {ports}")
        }
    };
    format!(
        "inbound TCP goes to port {inbound_port}, except: loopback, the admin port {admin_port}{}\n\
         outbound TCP goes to port {outbound_port}, except: loopback, the proxy's own (uid {proxy_uid}){}\n",
        skipped(skip_inbound_ports),
        skipped(skip_outbound_ports),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_says_what_is_left_alone() {
        assert_eq!(
            summary(&Config::example()),
            "inbound TCP goes to port 4000, except: loopback, the admin port 4001, ports 25, 9000-9100\n\
             outbound TCP goes to port 5000, except: loopback, the proxy's own (uid 1337), ports 3306\n"
        );
    }
}
