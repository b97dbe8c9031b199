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
    matches: Matches,
    /// None: no server is asked.
    rules: Vec<Option<Arc<Authorizer>>>,
}

impl RouteAuthorizers {
    /// The servers of rules, to which matches refer by index.
    pub fn new(matches: Matches, rules: Vec<Option<Arc<Authorizer>>>) -> Self {
        Self { matches, rules }
    }

    /// The servers that are asked about a request.
    pub(super) fn of_request(
        &self,
        request: &RequestView<'_>,
        plain_paths: bool,
    ) -> Result<Vec<Arc<Authorizer>>, RequestPart> {
        let Some(others) = other_readings(path(request), plain_paths) else {
            return Ok(self.rules.iter().flatten().cloned().collect());
        };
        let mut input = MatchInput::new(*request);
        let mut asked: Vec<Arc<Authorizer>> = self.selected(&input)?.into_iter().collect();
        for reading in &others {
            input.set_path(reading);
            let server = self.selected(&input)?;
            asked.extend(server.filter(|server| !asked.contains(server)));
        }
        Ok(asked)
    }

    /// The server of the rule that is selected.
    fn selected(&self, input: &MatchInput<'_>) -> Result<Option<Arc<Authorizer>>, RequestPart> {
        let rule = self.matches.select(input)?;
        Ok(rule.and_then(|rule| self.rules.get(rule)?.clone()))
    }
}
