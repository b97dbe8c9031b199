//! HTTP/2 through the proxy.
