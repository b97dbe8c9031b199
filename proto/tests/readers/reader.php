<?php
// What PHP reads from paths: a path per line in, its readings per line out, separated by tabs.
foreach (explode("\n", rtrim(stream_get_contents(STDIN), "\n")) as $line) {
    $readings = [];
    foreach (['php-parse_url' => $line, 'php-parse_url-absolute' => "http://localhost$line"] as $name => $url) {
        $path = parse_url($url, PHP_URL_PATH);
        if (is_string($path)) {
            $readings[] = "$name=$path";
            $readings[] = "$name-decoded=" . rawurldecode($path);
        }
    }
    // As frameworks read REQUEST_URI.
    $readings[] = 'php-rawurldecode=' . rawurldecode($line);
    echo implode("\t", $readings), "\n";
}
