// What Java reads from paths: a path per line in, its readings per line out, separated by tabs.
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.net.URI;
import java.net.URISyntaxException;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;

class Reader {
    public static void main(String[] args) throws Exception {
        var input = new InputStreamReader(System.in, StandardCharsets.UTF_8);
        var output = new StringBuilder();
        for (var line : new BufferedReader(input).lines().toList()) {
            var readings = new ArrayList<String>();
            try {
                var uri = new URI(line);
                add(readings, "java-URI", uri.getRawPath());
                add(readings, "java-URI-decoded", uri.getPath());
                add(readings, "java-URI-normalize", uri.normalize().getRawPath());
                add(readings, "java-URI-normalize-decoded", uri.normalize().getPath());
                add(readings, "java-URI-resolve", URI.create("http://localhost/").resolve(uri).getRawPath());
            } catch (URISyntaxException ignored) {
                // Rejected.
            }
            // URLDecoder reads a plus sign as a space: it is for forms.
            var decoded = URLDecoder.decode(line.replace("+", "%2B"), StandardCharsets.UTF_8);
            add(readings, "java-Path-normalize", Path.of(decoded).normalize().toString());
            for (var lenient : new boolean[] {false, true}) {
                var path = tomcat(line, lenient);
                if (path != null) {
                    add(readings, lenient ? "tomcat-lenient" : "tomcat", path);
                }
            }
            output.append(String.join("\t", readings)).append('\n');
        }
        System.out.print(output);
    }

    /**
     * The path of a request by the rules of Tomcat (parsePathParameters, decoding and normalize of its
     * CoyoteAdapter), or null if Tomcat rejects it: with its defaults, or with encodedSolidusHandling=decode
     * and allowBackslash=true.
     */
    private static String tomcat(String line, boolean lenient) {
        var path = line.replaceAll(";[^/]*", "");
        if (!lenient && path.toLowerCase().contains("%2f")) {
            return null;
        }
        path = URLDecoder.decode(path.replace("+", "%2B"), StandardCharsets.UTF_8);
        if (path.contains("\\")) {
            if (!lenient) {
                return null;
            }
            path = path.replace('\\', '/');
        }
        path = path.replaceAll("/+", "/");
        if (path.endsWith("/.") || path.endsWith("/..")) {
            path += "/";
        }
        while (path.contains("/./")) {
            path = path.replace("/./", "/");
        }
        for (int at; (at = path.indexOf("/../")) >= 0;) {
            if (at == 0) {
                return null;
            }
            path = path.substring(0, path.lastIndexOf('/', at - 1)) + path.substring(at + 3);
        }
        return path;
    }

    private static void add(ArrayList<String> readings, String name, String reading) {
        readings.add(name + "=" + (reading.isEmpty() ? "/" : reading));
    }
}
