//! The authorization servers in the routes of a Service: the rule that a request selects decides which
//! one is asked about it. The match is that of the client's proxy, for each reading of the path: a
//! request is asked about if a server may read it as one of the rule. Pure.

use std::sync::Arc;

use diy_mesh_proto::authorization::other_readings;

use super::Authorizer;
use crate::error::RequestPart;
use crate::http::view::RequestView;
use crate::route::matching::{MatchInput, Matches, path};

/// The rules of a Service port, as far as they ask authorization servers.
#[derive(Debug, Default)]
pub struct RouteAuthorizers {
    /// As the routes have them.
    pub matches: Matches,
    /// With paths without case and slashes at the end. None: these are the same.
    pub folded: Option<Matches>,
    /// The servers of the rules, to which matches refer by index. None: no server is asked.
    pub rules: Vec<Option<Arc<Authorizer>>>,
}

impl RouteAuthorizers {
    /// The servers that are asked about a request.
    pub(super) fn of_request(
        &self,
        request: &RequestView<'_>,
        plain_paths: bool,
    ) -> Result<Vec<Arc<Authorizer>>, RequestPart> {
        let path = path(request);
        let Some(others) = other_readings(path, plain_paths) else {
            return Ok(self.rules.iter().flatten().cloned().collect());
        };
        let readings = std::iter::once(path).chain(others.iter().map(Vec::as_slice));
        // Servers may ignore case, and slashes at the end.
        let folded: Vec<Vec<u8>> = readings.clone().map(fold).collect();
        let folded_matches = self.folded.as_ref().unwrap_or(&self.matches);
        let mut input = MatchInput::new(*request);
        let mut selected = vec![];
        for (reading, folded) in readings.zip(&folded) {
            input.set_path(reading);
            selected.extend(self.matches.select(&input)?);
            if self.folded.is_some() || reading != folded {
                input.set_path(folded);
                selected.extend(folded_matches.select(&input)?);
            }
        }
        selected.sort_unstable();
        selected.dedup();
        let servers = selected.iter().filter_map(|rule| self.rules.get(*rule));
        Ok(servers.flatten().cloned().collect())
    }
}

/// A path without case and slashes at the end.
fn fold(path: &[u8]) -> Vec<u8> {
    let length = path.iter().rposition(|byte| *byte != b'/').unwrap_or(0) + 1;
    path[..length.min(path.len())].to_ascii_lowercase()
}
