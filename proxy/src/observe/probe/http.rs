//! An HTTP GET as the kubelet sends it: HTTP/1.1, HTTP/2 if the probe says so, or what an HTTPS server
//! selects; certificates are not verified; redirects are followed on the same host only.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use http::header::{
    ACCEPT, CONNECTION, CONTENT_LENGTH, HOST, LOCATION, TRAILER, TRANSFER_ENCODING, USER_AGENT,
};
use http::uri::{Authority, Scheme};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::perform::{ProbeError, connect};
use super::{HttpGet, HttpProtocol, Pod};

/// Like Go's client, which the kubelet uses.
const MAX_REQUESTS: usize = 10;
/// The kubelet reads no more of a body.
const MAX_BODY_BYTES: usize = 10 * 1024;
const MAX_HEADER_FIELDS: usize = 1000;
/// The ALPN protocol of HTTP/2.
pub(super) const HTTP2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

/// Sends the request, follows redirects within the pod, and returns the last status.
pub(super) async fn get(
    get: &HttpGet,
    pod: &Pod,
    user_agent: &'static str,
) -> Result<StatusCode, ProbeError> {
    let (headers, host) = get.headers(user_agent)?;
    let mut url = get.url(pod.ip)?;
    let mut url_host = host.clone();
    for _ in 0..MAX_REQUESTS {
        let protocol = get.protocol;
        let (status, location) = exchange(pod, &url, url_host.as_ref(), &headers, protocol).await?;
        let Some(location) = location else {
            return Ok(status);
        };
        let is_absolute = location.contains("://");
        url = resolve(&url, &location).ok_or(ProbeError::Redirect)?;
        if ip_of(&url) != Some(pod.ip) {
            return Ok(status);
        }
        url_host = host.clone().filter(|_| !is_absolute);
    }
    Err(ProbeError::TooManyRedirects(MAX_REQUESTS))
}

impl HttpGet {
    pub(super) fn is_https(&self) -> bool {
        let scheme = self.scheme.as_deref();
        scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case("https"))
    }

    /// The request target of the path: with a leading slash, without a fragment, percent-encoded.
    pub(super) fn target(&self) -> String {
        let path = self.path.as_deref().unwrap_or_default();
        let path = path.split('#').next().unwrap_or_default();
        let mut target = String::from(if path.starts_with('/') { "" } else { "/" });
        for byte in path.bytes() {
            match byte {
                b'"' | b'<' | b'>' | b'\\' | b'^' | b'`' | b'{' | b'|' | b'}' => {
                    target.push_str(&format!("%{byte:02X}"))
                }
                _ if byte.is_ascii_graphic() => target.push(char::from(byte)),
                _ => target.push_str(&format!("%{byte:02X}")),
            }
        }
        target
    }

    fn url(&self, ip: IpAddr) -> Result<Uri, http::Error> {
        let scheme = if self.is_https() { "https" } else { "http" };
        let address = SocketAddr::new(ip, self.port.get());
        Uri::builder()
            .scheme(scheme)
            .authority(address.to_string())
            .path_and_query(self.target())
            .build()
    }

    /// The header fields of the request, and the value of `Host` if the probe sets it.
    fn headers(
        &self,
        user_agent: &'static str,
    ) -> Result<(HeaderMap, Option<HeaderValue>), http::Error> {
        let mut headers = HeaderMap::new();
        for header in self.http_headers.iter().flatten() {
            let name = HeaderName::try_from(&header.name)?;
            headers.append(name, HeaderValue::try_from(&header.value)?);
        }
        let host = headers.remove(HOST).filter(|host| !host.is_empty());
        // Go's client ignores these.
        for name in [CONTENT_LENGTH, TRANSFER_ENCODING, TRAILER] {
            headers.remove(name);
        }
        for (name, default) in [(USER_AGENT, user_agent), (ACCEPT, "*/*")] {
            match headers.get(&name) {
                Some(value) if value.is_empty() => drop(headers.remove(name)),
                Some(_) => {}
                None => drop(headers.insert(name, HeaderValue::from_static(default))),
            }
        }
        Ok((headers, host))
    }
}

/// One request and its response. Returns the status, and the location of a redirect.
async fn exchange(
    pod: &Pod,
    url: &Uri,
    host: Option<&HeaderValue>,
    headers: &HeaderMap,
    protocol: HttpProtocol,
) -> Result<(StatusCode, Option<String>), ProbeError> {
    let is_https = url.scheme() == Some(&Scheme::HTTPS);
    let port = url.port_u16().unwrap_or(if is_https { 443 } else { 80 });
    let stream = connect(pod, port).await?;
    let mut request = Request::new(Empty::new());
    *request.headers_mut() = headers.clone();
    let response = if is_https {
        let stream = handshake(pod.ip, port, stream, &[HTTP2, HTTP1]).await?;
        if stream.get_ref().1.alpn_protocol() == Some(HTTP2) {
            http2_exchange(stream, request, url, host).await?
        } else {
            http1_exchange(stream, request, url, host).await?
        }
    } else {
        match protocol {
            HttpProtocol::Http1 => http1_exchange(stream, request, url, host).await?,
            HttpProtocol::Http2 => http2_exchange(stream, request, url, host).await?,
        }
    };
    let location = match response.status().as_u16() {
        301 | 302 | 303 | 307 | 308 => response.headers().get(LOCATION),
        _ => None,
    };
    let location = location
        .filter(|location| !location.is_empty())
        .map(|location| location.to_str().map(str::to_owned))
        .transpose()
        .map_err(|_| ProbeError::Redirect)?;
    Ok((response.status(), location))
}

async fn http1_exchange(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    mut request: Request<Empty<Bytes>>,
    url: &Uri,
    host: Option<&HeaderValue>,
) -> Result<Response<()>, ProbeError> {
    let target = url.path_and_query().map_or("/", |target| target.as_str());
    *request.uri_mut() = target.parse().map_err(http::Error::from)?;
    let authority = url.authority().map_or("", Authority::as_str);
    let host = host.map_or_else(|| HeaderValue::try_from(authority), |host| Ok(host.clone()));
    let headers = request.headers_mut();
    headers.insert(HOST, host.map_err(http::Error::from)?);
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    let (mut sender, connection) = http1::Builder::new()
        .title_case_headers(true)
        .max_headers(MAX_HEADER_FIELDS)
        // Like Go's client.
        .allow_obsolete_multiline_headers_in_responses(true)
        .handshake(TokioIo::new(stream))
        .await?;
    read(sender.send_request(request), connection).await
}

async fn http2_exchange(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    mut request: Request<Empty<Bytes>>,
    url: &Uri,
    host: Option<&HeaderValue>,
) -> Result<Response<()>, ProbeError> {
    *request.uri_mut() = with_authority(url, host)?;
    let (mut sender, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
    read(sender.send_request(request), connection).await
}

/// Drives the connection until the head and the start of the body have arrived.
async fn read(
    response: impl Future<Output = hyper::Result<Response<Incoming>>>,
    connection: impl Future,
) -> Result<Response<()>, ProbeError> {
    let reading = async {
        let (head, mut body) = response.await?.into_parts();
        let mut length = 0;
        while length < MAX_BODY_BYTES
            && let Some(frame) = body.frame().await
        {
            length += frame?.data_ref().map_or(0, Bytes::len);
        }
        Ok(Response::from_parts(head, ()))
    };
    let mut reading = std::pin::pin!(reading);
    tokio::select! {
        result = &mut reading => result,
        // The received bytes are still to be read.
        _ = connection => reading.await,
    }
}

/// The URL of an HTTP/2 request, whose authority replaces `Host`.
fn with_authority(url: &Uri, host: Option<&HeaderValue>) -> Result<Uri, http::Error> {
    let mut parts = url.clone().into_parts();
    if let Some(host) = host {
        parts.authority = Some(Authority::try_from(host.as_bytes())?);
    }
    Ok(Uri::from_parts(parts)?)
}

/// The URL of a redirect.
fn resolve(base: &Uri, location: &str) -> Option<Uri> {
    let location = location.split('#').next()?;
    let scheme = base.scheme_str()?;
    let origin = || Some(format!("{scheme}://{}", base.authority()?));
    let url = if location.contains("://") {
        location.to_owned()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        origin()? + location
    } else if location.starts_with('?') || location.is_empty() {
        origin()? + base.path() + location
    } else {
        let (directory, _) = base.path().rsplit_once('/')?;
        format!("{}{directory}/{location}", origin()?)
    };
    let url: Uri = url.parse().ok()?;
    matches!(url.scheme_str(), Some("http" | "https")).then_some(url)
}

fn ip_of(url: &Uri) -> Option<IpAddr> {
    let host = url.host()?;
    host.trim_start_matches('[')
        .trim_end_matches(']')
        .parse()
        .ok()
}

/// A TLS session that offers these ALPN protocols.
pub(super) async fn handshake(
    ip: IpAddr,
    port: u16,
    stream: TcpStream,
    alpn: &[&[u8]],
) -> Result<TlsStream<TcpStream>, ProbeError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier = Arc::new(AnyCertificate(provider.clone()));
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has the cipher suites of TLS 1.2 and 1.3")
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    TlsConnector::from(Arc::new(config))
        .connect(ServerName::IpAddress(ip.into()), stream)
        .await
        .map_err(|error| ProbeError::Tls(SocketAddr::new(ip, port), error))
}

/// Accepts every certificate, as the kubelet does: a probe shows that the application responds, not
/// who it is, and sends no secret but what the pod's manifest contains.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(path: &str) -> HttpGet {
        serde_json::from_value(serde_json::json!({"port": 8080, "path": path})).expect("a probe")
    }

    #[test]
    fn encodes_paths_as_the_kubelet_does() {
        assert_eq!(get("health?full=1#top").target(), "/health?full=1");
        assert_eq!(get("/a b/ü/%20").target(), "/a%20b/%C3%BC/%20");
        assert_eq!(get("").target(), "/");
        assert!(get("/\"{}[]\0\n").url(IpAddr::from([10, 0, 0, 1])).is_ok());
    }

    #[test]
    fn resolves_locations() {
        let base: Uri = "https://10.0.0.1:8443/a/b?c".parse().expect("a URL");
        for (location, expected) in [
            ("/x?y#z", "https://10.0.0.1:8443/x?y"),
            ("x", "https://10.0.0.1:8443/a/x"),
            ("?y", "https://10.0.0.1:8443/a/b?y"),
            ("//10.0.0.2/x", "https://10.0.0.2/x"),
            ("http://other:80/", "http://other:80/"),
        ] {
            let url = resolve(&base, location).map(|url| url.to_string());
            assert_eq!(url.as_deref(), Some(expected));
        }
        for location in ["ftp://10.0.0.1/", "http://", "/a b", "http://[/"] {
            assert_eq!(resolve(&base, location), None, "{location}");
        }
        let v6: Uri = "http://[fd00::1]:80/".parse().expect("a URL");
        assert_eq!(ip_of(&v6), "fd00::1".parse().ok());
        assert_eq!(ip_of(&base), "10.0.0.1".parse().ok());
    }
}
