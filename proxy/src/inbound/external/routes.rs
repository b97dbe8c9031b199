//! The authorization servers in the routes of a Service: the rule that a request selects decides
//! which one is asked about it. It matches as the client's proxy does, for each reading of the
//! method and the path: a server is asked if the application may read the request as one of its
//! rule. Pure.

use std::sync::Arc;

use diy_mesh_proto::authorization::{decoded_pattern, may_be_get, other_readings};

use super::Authorizer;
use crate::error::RequestPart;
use crate::http::view::RequestView;
use crate::route::matching::{MatchInput, Matches, path};

/// The rules of a Service port, as far as they ask authorization servers.
#[derive(Debug, Default)]
pub struct RouteAuthorizers {
    /// As the routes have them.
    pub matches: Matches,
    /// The matches with folded paths, or `None` if these are the same.
    pub folded: Option<Matches>,
    /// The servers of the rules, to which matches refer by index. `None`: no server is asked.
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
        let upper = request.method.to_ascii_uppercase();
        let mut methods = vec![request.method, &upper];
        methods.extend(may_be_get(request.method).then_some(&b"GET"[..]));
        methods.dedup();
        let mut input = MatchInput::new(*request);
        let mut selected = vec![];
        for method in methods {
            input.set_method(method);
            for (reading, folded) in readings.clone().zip(&folded) {
                input.set_path(reading);
                selected.extend(self.matches.select(&input)?);
                if self.folded.is_some() || reading != folded {
                    input.set_path(folded);
                    selected.extend(folded_matches.select(&input)?);
                }
            }
        }
        selected.sort_unstable();
        selected.dedup();
        let servers = selected.iter().filter_map(|rule| self.rules.get(*rule));
        Ok(servers.flatten().cloned().collect())
    }
}

/// The path of a match as readings are folded.
pub fn folded_match(path: &str) -> String {
    let decoded = decoded_pattern(path.as_bytes());
    let folded = fold(decoded.as_deref().unwrap_or(path.as_bytes()));
    String::from_utf8_lossy(&folded).into_owned()
}

/// A path without case and slashes at the end, of characters that a match may have: others are
/// encoded.
fn fold(path: &[u8]) -> Vec<u8> {
    let length = path.iter().rposition(|byte| *byte != b'/').unwrap_or(0) + 1;
    let mut folded = Vec::with_capacity(length);
    for byte in &path[..length.min(path.len())] {
        if byte.is_ascii_graphic() && !b"?#".contains(byte) {
            folded.push(byte.to_ascii_lowercase());
        } else {
            folded.extend(format!("%{byte:02x}").bytes());
        }
    }
    folded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::view::testing::request;
    use crate::route::matching::Match;

    #[test]
    fn method_is_read_as_servers_may_read_it() {
        let authorizer = Authorizer::new("HTTPRoute shop/web", &Default::default());
        let of_get = RouteAuthorizers {
            matches: Matches::new(vec![Match {
                method: Some("GET".to_owned()),
                ..Match::default()
            }]),
            folded: None,
            rules: vec![Some(Arc::new(authorizer))],
        };
        let asked = |method, target| of_get.of_request(&request(method, target), false).unwrap();
        for (method, target) in [("GET", "/"), ("get", "/"), ("CONNECT", "web:80")] {
            assert_eq!(asked(method, target).len(), 1, "{method}");
        }
        assert!(asked("POST", "/").is_empty());
    }
}
