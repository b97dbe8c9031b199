//! Redirect rules of one network namespace: flags ([`config`]) become rules ([`rules`]), which
//! [`apply`] loads.
//!
//! Inbound TCP is redirected to the proxy's inbound port, outbound TCP to its outbound port, for
//! IPv4 and IPv6. UDP and other protocols are not redirected. A run is idempotent, and loads the
//! rules of one address family atomically. The program exits after that; it uses neither the
//! network nor the Kubernetes API.

pub mod apply;
pub mod config;
pub mod rules;

use std::fmt::Write;

use diy_mesh_model::ports::PortSet;
use thiserror::Error;

use crate::config::Config;
use crate::rules::{Family, Rules};

/// Error of a run.
#[derive(Debug, Error)]
pub enum Error {
    /// The IPv4 rules could not be loaded.
    #[error("cannot set the IPv4 rules: {0}")]
    Ipv4(apply::Error),
    /// The IPv6 rules could not be loaded, and the pod has an IPv6 address.
    #[error(
        "cannot set the IPv6 rules: {0}; this pod has an IPv6 address whose traffic would bypass the proxy: \
         provide the nat table of ip6tables on the node, or remove the pod's IPv6 address"
    )]
    Ipv6(apply::Error),
}

/// Sets the rules, or only prints them on a dry run, and returns the report for standard output.
pub fn run(config: &Config) -> Result<String, Error> {
    if config.dry_run {
        return Ok(dry_run(config));
    }
    let ipv4 =
        apply::apply(&Rules::new(config, Family::V4), &config.search_path).map_err(Error::Ipv4)?;
    let ipv6 = match apply::apply(&Rules::new(config, Family::V6), &config.search_path) {
        Ok(backend) => format!("IPv6: set by {backend}"),
        Err(error) if apply::has_ipv6_address() => return Err(Error::Ipv6(error)),
        Err(error) => format!("IPv6: skipped, this pod has no IPv6 address: {error}"),
    };
    Ok(format!("{}IPv4: set by {ipv4}\n{ipv6}\n", summary(config)))
}

/// Input of iptables-restore for a namespace without rules, for both address families.
fn dry_run(config: &Config) -> String {
    let mut text = String::new();
    for family in [Family::V4, Family::V6] {
        let input = Rules::new(config, family).restore_input("");
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
    let skipped = |ports: &PortSet| {
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
    fn summary_lists_redirects_and_exceptions() {
        assert_eq!(
            summary(&Config::example()),
            "inbound TCP goes to port 4000, except: loopback, the admin port 4001, ports 25,9000-9100\n\
             outbound TCP goes to port 5000, except: loopback, the proxy's own (uid 1337), ports 3306\n"
        );
    }
}
